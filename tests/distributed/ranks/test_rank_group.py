"""Cores with follower processes: the tokens of one rank, and errors that name the lost rank, for every kind of loss."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.frontend import core_process
from moe_engine.processes.addresses import free_port
from tests.distributed.ranks import drill as drills
from tests.distributed.ranks.drill import PATIENCE, Drill, drill, exited, options, until
from tests.distributed.ranks.held import Hold, broken_worker, meeting_worker
from tests.distributed.ranks.node import two_nodes
from tests.models.checkpoints import make_checkpoint

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(5)]

LONG = 400


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model"), seed=31)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 200) for _ in range(rng.randint(4, 60))] for _ in range(count)]


async def tokens_of(checkpoint: Path, size: int | None) -> list[list[int]]:
    async with drill(checkpoint, options(size, meeting_worker) if size else None) as running:
        for i, prompt in enumerate(prompts(5)):
            running.ask(prompt, 12 + i, temperature=0.0 if i % 2 else 0.8)
        return [fate.tokens for fate in await running.fates()]


def test_ranks_give_the_tokens_of_one_rank(checkpoint: Path) -> None:
    alone = asyncio.run(tokens_of(checkpoint, None))
    together = asyncio.run(tokens_of(checkpoint, 2))
    assert together == alone and all(alone)


async def hold_and(checkpoint: Path, hold: Hold, strike: signal.Signals, target: int, size: int = 2) -> Report:
    """Two requests run until rank `hold.rank` blocks at its place; then rank `target` is killed or stopped."""
    async with drill(checkpoint, options(size, partial(meeting_worker, hold=hold))) as running:
        for prompt in prompts(2):
            running.ask(prompt, LONG)
        await until(hold.flag.exists)
        return await strike_and_watch(running, strike, target)


async def strike_and_watch(running: Drill, strike: signal.Signals, target: int) -> Report:
    struck = running.ranks[target]
    began = time.monotonic()
    struck.send_signal(strike)
    await until(lambda: running.core.dead is not None)
    ended = time.monotonic() - began
    if strike == signal.SIGSTOP and target == 0:
        struck.kill()
    exited = await running.all_exited()
    fates = await running.fates()
    report = Report(struck.pid, ended, exited, str(running.core.dead), [fate.text for fate in fates])
    print(f"\n{strike.name} of rank {target}: the core had exited after {ended:.2f} s, all ranks exited: {exited}")
    print(f"  core: {report.cause}", *(f"  request: {text}" for text in report.fates), sep="\n")
    return report


@dataclass
class Report:
    pid: int
    seconds: float
    exited: bool
    cause: str
    fates: list[str]

    def check(self, expected: str) -> None:
        assert self.exited
        assert expected in self.cause
        assert self.fates == [self.cause] * 2


def test_follower_killed_in_prefill_is_named(checkpoint: Path, tmp_path: Path, capfd: Any) -> None:
    """Also on the other ranks. In decode: tests/distributed/engine/test_faults.py."""
    report = asyncio.run(hold_and(checkpoint, Hold(1, "prefill", tmp_path / "flag"), signal.SIGKILL, 1, size=3))
    report.check(f"DP0 TP1 (pid {report.pid}) was killed by SIGKILL (last sign: ")  # may be older
    assert f"DP0 TP2] This rank exits: DP0 TP1 (pid {report.pid}) was killed" in stderr_of(capfd)


def test_follower_stopped_in_decode_is_named_though_collectives_still_wait(
    checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    """In prefill: tests/distributed/engine/test_faults.py."""
    report = asyncio.run(hold_and(checkpoint, Hold(1, "decode", tmp_path / "flag", 3), signal.SIGSTOP, 1))
    report.check(f"DP0 TP1 (pid {report.pid}) silent for")
    assert f"DP0 TP1 (pid {report.pid}) is late: " in stderr_of(capfd)  # the last sign may be older than the step


def test_followers_exit_with_a_killed_leader(checkpoint: Path, tmp_path: Path) -> None:
    report = asyncio.run(hold_and(checkpoint, Hold(1, "decode", tmp_path / "flag", 3), signal.SIGKILL, 0))
    assert report.exited and "was killed by SIGKILL" in report.cause


def test_a_stopped_leader_is_named_and_all_exit(
    checkpoint: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> tuple[int, str, bool]:
        hold = Hold(1, "decode", tmp_path / "flag", 3)
        async with drill(checkpoint, options(2, partial(meeting_worker, hold=hold))) as running:
            running.ask(prompts(1)[0], LONG)
            await until(hold.flag.exists)
            leader, follower = running.ranks
            leader.suspend()
            await until(lambda: exited(follower))
            monkeypatch.setattr(core_process, "HELD_SECONDS", 0.3)

            def named() -> bool:
                running.core.kill_if_stopped()
                return running.core.dead is not None

            await until(named)
            return leader.pid, str(running.core.dead), await running.all_exited()

    pid, cause, all_exited = asyncio.run(run())
    assert re.search(rf"\(pid {pid}\) was killed by SIGKILL: it had been stopped by a signal for \d+\.\d s", cause)
    assert all_exited and f"DP0 TP1] This rank exits: DP0 TP0 (pid {pid}) silent for" in stderr_of(capfd)


def test_error_while_loading_names_its_rank(checkpoint: Path) -> None:
    core = drills.CoreProcess(drills.config_of(checkpoint), ranks=options(2, broken_worker))
    leader = psutil.Process(core.pid)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"DP0 TP1 \(pid \d+\) failed: model-00002.safetensors: truncated"):
        core.wait_ready()
    print(f"\nnamed {time.monotonic() - began:.2f} s after the start")
    assert not leader.is_running()


def loading(checkpoint: Path, flag: Path, capfd: Any) -> tuple[drills.CoreProcess, psutil.Process]:
    """A core that waits for rank 1, which has reported that it is loading, and blocks."""
    hold = Hold(1, "load", flag)
    core = drills.CoreProcess(drills.config_of(checkpoint), ranks=options(2, partial(meeting_worker, hold=hold)))
    output = ""
    try:
        asyncio.run(until(lambda: flag.exists() and flag.read_text() != ""))
        pid = int(flag.read_text())

        def named() -> bool:
            nonlocal output
            output += capfd.readouterr().err
            return re.search(rf"of 120 s: .*DP0 TP1 \(pid {pid}\) loading", output) is not None

        asyncio.run(until(named))
    except BaseException:
        core.expect_exit()
        core.stop(0.0)
        raise
    return core, psutil.Process(pid)


@pytest.mark.parametrize(
    ("strike", "words"),
    [
        (signal.SIGKILL, r"was killed by SIGKILL \(last sign: loading\)"),
        (signal.SIGSTOP, r"has been stopped by a signal for \d+\.\d s \(last sign: loading\)"),
    ],
)
def test_follower_lost_while_loading_is_named(
    checkpoint: Path, tmp_path: Path, capfd: Any, strike: signal.Signals, words: str
) -> None:
    core, rank = loading(checkpoint, tmp_path / "flag", capfd)
    rank.send_signal(strike)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"DP0 TP1 \(pid {rank.pid}\) {words}") as caught:
        core.wait_ready()
    print(f"\n{strike.name} while loading: named, all exited, after {time.monotonic() - began:.2f} s: {caught.value}")
    assert not psutil.pid_exists(core.pid) and not psutil.pid_exists(rank.pid)


def test_leader_stopped_while_loading_is_named(
    checkpoint: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1.0)
    core, follower = loading(checkpoint, tmp_path / "flag", capfd)
    psutil.Process(core.pid).suspend()
    with pytest.raises(
        EngineDeadError, match=rf"engine core \(pid {core.pid}\) has been stopped by a signal for \d+\.\d s"
    ):
        core.wait_ready()
    asyncio.run(until(lambda: drills.ended(follower)))


def stderr_of(capfd: Any) -> str:
    """Log of the processes."""
    out, err = capfd.readouterr()
    print(out, err, sep="\n")
    return err


def test_killed_rank_of_another_node_is_named_with_its_host(checkpoint: Path, tmp_path: Path, capfd: Any) -> None:
    address = f"127.0.0.1:{free_port()}"
    flag = tmp_path / "flag"
    command = [sys.executable, "-m", "tests.distributed.ranks.node", str(checkpoint), address, str(flag), "decode"]
    node = subprocess.Popen(command)

    async def run() -> Report:
        async with drill(checkpoint, two_nodes(address, 0, flag, "decode")) as running:
            for prompt in prompts(2):
                running.ask(prompt, LONG)
            await until(lambda: flag.exists() and bool(flag.read_text()))
            running.ranks.append(psutil.Process(int(flag.read_text())))
            return await strike_and_watch(running, signal.SIGKILL, 1)

    try:
        report = asyncio.run(run())
        report.check(f"DP0 TP1 (pid {report.pid}) was killed by SIGKILL on {socket.gethostname()} (last sign: ")
        assert node.wait(PATIENCE) == 1
        assert "Node 1 exits: DP0 TP1" in stderr_of(capfd)
    finally:
        node.kill()
