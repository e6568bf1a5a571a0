"""Trial engine over all nodes: the embedded model, one CPU rank per node, so that real steps use every link."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_engine.cli.cluster_check.report import Finding
from moe_engine.planning.inputs.checkpoint import embedded_model

QUESTION, ANSWER = "What is the capital of France?", "Paris"
TORCH_KERNELS = [
    part
    for family in ("attention", "moe-runner", "linear", "ops", "sampling")
    for part in (f"--{family}-backend", "torch")
]
"""Run on every CPU; the faster kernels need a compiler and a minute to compile."""
TAIL_LINES = 8
"""Log lines of node 0's part in the report; the last one of the others."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 60.0
"""Time for the answer after the engine is ready."""
END_SECONDS = 15.0
"""Time for every node's part of the engine to exit after the first one."""


def trial_flags(num_nodes: int, address: str, start_seconds: float) -> list[str]:
    """Flags of the engine for one rank per node, with rendezvous at `address`.

    Data-parallel attention and expert parallelism over all ranks. Redundant experts make the number of slots divisible
    by the number of ranks.
    """
    flags = ["--device", "cpu", "--max-total-tokens", "4096", *TORCH_KERNELS]
    if num_nodes == 1:
        return flags
    experts = json.loads((Path(embedded_model()) / "config.json").read_text())["n_routed_experts"]
    count, redundant = str(num_nodes), -experts % num_nodes
    return [
        *flags,
        *("--tp-size", count, "--attn-dp-size", count, "--ep-size", count),
        *("--moe-dense-tp-size", "1", "--enable-dp-lm-head", "--moe-a2a-backend", "auto"),
        *(("--ep-num-redundant-experts", str(redundant)) if redundant else ()),
        *("--nnodes", count, "--dist-init-addr", address, "--dist-timeout", str(max(1, int(start_seconds)))),
    ]


def part_command(flags: Sequence[str], rank: int) -> list[str]:
    """Node 0 sends the request; the other nodes serve until it has the answer."""
    verb = ["serve"] if rank else ["generate", "--prompt", QUESTION, "--max-new-tokens", "24"]
    return [sys.executable, "-m", "moe_engine", *verb, *flags, "--node-rank", str(rank)]


def run_part(flags: Sequence[str], rank: int, start_seconds: float, one_ended: Callable[[], bool]) -> Finding:
    """Runs this node's part of the engine until it exits, or until its time is over.

    Args:
        one_ended: whether the part of any node has exited.
    """
    command = part_command(flags, rank)
    with tempfile.TemporaryFile("w+", prefix="moe-engine-check-") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + start_seconds + ANSWER_SECONDS
        try:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                if one_ended():
                    deadline = min(deadline, time.monotonic() + END_SECONDS)
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if code is None:
        state = "hangs"
    elif code:
        state = f"exit code {code}"
    elif rank == 0 and ANSWER not in "\n".join(lines):
        state = "wrong answer"
    else:
        return Finding({"engine": "ok"})
    tail = "".join(f"\n    {line}" for line in lines[-TAIL_LINES if rank == 0 else -1 :])
    return Finding({"engine": state}, [f"{socket.gethostname()}: its part of the engine: {state}; last lines:{tail}"])
