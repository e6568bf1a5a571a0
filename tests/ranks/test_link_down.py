"""The cable of a node is pulled: the rank behind it is named within seconds, in whatever phase, and both sides end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.ranks.drill import PATIENCE, until
from tests.ranks.hosts import ADDRESSES, TwoHosts, two_hosts, why_not


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_rank_behind_a_pulled_cable_is_named(
    hosts: TwoHosts, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag, address = tmp_path / "flag", f"{ADDRESSES[0]}:5000"
    arguments = [str(make_checkpoint("deepseek_v3", tmp_path / "model", seed=31)), address, str(flag), phase]
    with open(tmp_path / "log", "w") as log:
        node = hosts.start(1, sys.executable, "-m", "tests.ranks.node", *arguments, stderr=log)
        front = hosts.start(
            0, sys.executable, "-m", "tests.ranks.front", *arguments, stdout=subprocess.PIPE, stderr=log
        )
    try:
        asyncio.run(until(lambda: flag.exists() and flag.read_text() != ""))
        pid, struck = int(flag.read_text()), time.monotonic()
        hosts.pull_cable()
        report = json.loads(front.communicate(timeout=2 * PATIENCE)[0])
        assert node.wait(PATIENCE) == 1
    finally:
        said = (tmp_path / "log").read_text()
        print(said)
        for process in (front, node):
            process.kill()
            process.wait()
    print(f"link down in {phase}: all had ended after {report['ended'] - struck:.2f} s")
    print(f"  core: {report['cause']}", *(f"  request: {text}" for text in report["fates"]), sep="\n")
    named = f"DP0 TP1 (pid {pid} on {socket.gethostname()}) silent for"
    assert named in report["cause"]
    assert report["fates"] == ([] if phase == "load" else [report["cause"]] * 2)
    if phase == "load":
        assert f"DP0 TP1 (pid {pid} on {socket.gethostname()}) gives no sign" in said
    assert "Node 1 leaves: " in said
