"""Trial engine over all nodes: the embedded model, one CPU rank per node, so that real steps use every link."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from moe_engine.cli.cluster_check.wire import EngineEnded
from moe_engine.planning.checkpoint import embedded_model

QUESTION, ANSWER = "What is the capital of France?", "Paris"
TORCH_KERNELS = [
    part
    for family in ("attention", "moe-runner", "linear", "ops", "sampling")
    for part in (f"--{family}-backend", "torch")
]
"""Run on every CPU; the faster kernels need a compiler and a minute to compile."""
TAIL_LINES = 8
POLL_SECONDS = 0.2
REQUEST_SECONDS = 60.0
STOP_SECONDS = 10.0


def trial_flags(num_nodes: int, leader_address: str | None, start_seconds: int) -> list[str]:
    """Flags of ``moe-engine serve`` for one rank per node.

    Data-parallel attention and expert parallelism over all ranks. Redundant experts make the number of slots divisible
    by the number of ranks.
    """
    flags = ["--device", "cpu", "--max-total-tokens", "4096", *TORCH_KERNELS]
    if num_nodes == 1:
        return flags
    assert leader_address is not None
    experts = json.loads((Path(embedded_model()) / "config.json").read_text())["n_routed_experts"]
    count, redundant = str(num_nodes), -experts % num_nodes
    return [
        *flags,
        *("--tp-size", count, "--attn-dp-size", count, "--ep-size", count),
        *("--moe-dense-tp-size", "1", "--enable-dp-lm-head", "--moe-a2a-backend", "auto"),
        *(("--ep-num-redundant-experts", str(redundant)) if redundant else ()),
        *("--nnodes", count, "--dist-init-addr", leader_address, "--dist-timeout", str(start_seconds)),
    ]


class EngineProcess:
    """This node's part of the engine."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[str]) -> None:
        self._process, self._log = process, log

    @classmethod
    async def start(cls, flags: Sequence[str], node_rank: int, http_port: int | None = None) -> EngineProcess:
        """Args: http_port: for the node that has the HTTP server."""
        command = [sys.executable, "-m", "moe_engine.launch_server", *flags, "--node-rank", str(node_rank)]
        if http_port is not None:
            command += ["--host", "127.0.0.1", "--port", str(http_port)]
        log = tempfile.TemporaryFile("w+", prefix="moe-engine-check-")  # noqa: SIM115  # closed with the process
        nothing = asyncio.subprocess.DEVNULL
        return cls(await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=log, stderr=log), log)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> EngineEnded:
        """Waits for its exit."""
        code = await self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return EngineEnded(code, lines[-TAIL_LINES:])

    async def stop(self) -> None:
        """Stops it by SIGTERM, after `STOP_SECONDS` by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._process.wait()


async def ask(engine: EngineProcess, http_port: int, seconds: float) -> str:
    """Waits until the engine is ready and sends the question; returns the problem, or ""."""
    url = f"http://127.0.0.1:{http_port}"
    try:
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(_healthy, url):
                if not engine.running:
                    return "the engine exited during startup"
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return f"the engine was not ready within {seconds:g} s"
    try:
        answer = await asyncio.to_thread(_chat, url)
    except (OSError, ValueError, LookupError) as error:
        return f"the request to the engine failed: {error}"
    return "" if ANSWER in answer else f"the engine answered {answer[:80]!r} to {QUESTION!r}"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _chat(url: str) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
