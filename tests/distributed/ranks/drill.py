"""A core with ranks, its requests and their results, for fault tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from moe_engine.config.args import EngineArgs
from moe_engine.core import messages
from moe_engine.errors import EngineDeadError
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.frontend.client import CoreClient
from moe_engine.frontend.core_process import CoreProcess
from moe_engine.planning.prepare import prepare
from moe_engine.sampling_checks import parse_sampling
from tests.fork_server import children

LIMITS = DetectorLimits(
    silent=4.0, start_late=4.0, start_silent=12.0, late=0.4, late_factor=0.0, start=120.0, progress=0.4
)
"""A rank is late after a fixed time, independent of step times on this machine. On a busy one a rank that imports torch
is silent for several seconds."""
PATIENCE = 180.0
"""Time limit in seconds, far above the real durations even on a slow machine."""


def options(size: int, make_worker: Callable[..., Any], **changes: Any) -> RankGroupOptions:
    return RankGroupOptions(size, make_worker, **{"limits": LIMITS, "first_group": 0, **changes})


def config_of(checkpoint: Path) -> Any:
    """A configuration with torch's kernels, which load quickly and need no compilation."""
    backends = {f"{family}_backend": "torch" for family in ("attention", "moe_runner", "linear", "ops", "sampling")}
    return prepare(EngineArgs.from_kwargs(model_path=str(checkpoint), max_total_tokens=4096, **backends))


@dataclass
class Fate:
    """Result of a request: its tokens and the reason of its end."""

    tokens: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    error: str = ""

    @property
    def text(self) -> str:
        return self.error or str((self.finish or {}).get("message"))


class Drill:
    """A running core, its client and its processes."""

    def __init__(self, core: CoreProcess) -> None:
        self.core = core
        self.client = CoreClient(core, core.wait_ready())
        self.leader = psutil.Process(core.pid)
        self.ranks = [self.leader, *sorted(children(self.leader), key=rank_of)]
        self._tasks: list[asyncio.Task[Fate]] = []

    def ask(self, prompt: list[int], num_tokens: int, **sampling: Any) -> None:
        params = parse_sampling({"temperature": 0.0, "ignore_eos": True, **sampling})
        rid = f"request{len(self._tasks)}"
        request = messages.AddRequest(rid, prompt, msgspec.to_builtins(params), num_tokens, seed=7)
        self._tasks.append(asyncio.create_task(self._fate(request)))

    async def fates(self, timeout: float = PATIENCE) -> list[Fate]:
        async with asyncio.timeout(timeout):
            return list(await asyncio.gather(*self._tasks))

    async def all_exited(self, timeout: float = PATIENCE) -> bool:
        """True if every process of the core has ended within `timeout` seconds, without a zombie."""
        deadline = time.monotonic() + timeout
        while not all(ended(process) for process in self.ranks):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _fate(self, request: messages.AddRequest) -> Fate:
        fate = Fate()
        try:
            async for delta in self.client.stream(request):
                fate.tokens += delta.token_ids
                fate.finish = delta.finish
        except EngineDeadError as error:
            fate.error = str(error)
        return fate


def exited(process: psutil.Process) -> bool:
    """True if a process has exited, possibly not yet reaped because its parent is stopped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ended(process: psutil.Process) -> bool:
    """True once a process inherited by init has exited, before init reaps it."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1)
    except psutil.NoSuchProcess:
        return True


def rank_of(process: psutil.Process) -> float:
    return process.create_time()  # the leader starts them in order


@asynccontextmanager
async def drill(checkpoint: Path, ranks: RankGroupOptions | None) -> AsyncIterator[Drill]:
    core = CoreProcess(config_of(checkpoint), ranks=ranks)
    try:
        running = Drill(core)
        yield running
        await running.client.shutdown()
    finally:
        core.expect_exit()
        core.stop(0.0)


async def until(condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the rank did not reach its place"
        await asyncio.sleep(0.005)
