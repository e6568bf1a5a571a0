"""The cable of a node is pulled that has a replica of its own: it is named, the other goes on, both sides end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.cluster import FLAGS
from tests.ranks.drill import PATIENCE, until
from tests.ranks.hosts import ADDRESSES, two_hosts, why_not


def test_the_replica_behind_a_pulled_cable_is_named_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag, address = tmp_path / "flag", f"{ADDRESSES[0]}:5000"
    at = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address, "--dp-size", "2")
    with two_hosts() as hosts, open(tmp_path / "log", "w") as log:
        front = hosts.start(
            0, sys.executable, "-m", "tests.nodes.front", address, str(flag), *FLAGS, stdout=subprocess.PIPE, stderr=log
        )
        node = hosts.start(1, sys.executable, "-m", "moe_engine.launch_server", *at, *FLAGS, stdout=log, stderr=log)
        try:
            asyncio.run(until(flag.exists, 2 * PATIENCE))
            hosts.pull_cable()
            report = json.loads(front.communicate(timeout=2 * PATIENCE)[0])
            assert node.wait(PATIENCE) == 1
        finally:
            said = (tmp_path / "log").read_text()
            print(said)
            for process in (front, node):
                process.kill()
                process.wait()
    assert report["lost"][0] == report["lost"][1]
    assert "engine core DP1 on " in report["lost"][0] and "is lost: node 1 (" in report["lost"][0]
    assert "silent for" in report["lost"][0]
    assert report["after"] == report["before"] and len(report["after"]) == 64
    assert f"Node 1 leaves: the leader at tcp://{ADDRESSES[0]}:5000 silent for" in said
