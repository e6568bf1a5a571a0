"""The cable of a node is pulled that has a replica of its own: it is named, the other goes on, both sides end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cluster import FLAGS
from tests.ranks.hosts import ADDRESSES, two_hosts, why_not


def test_the_replica_behind_a_pulled_cable_is_named_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag, address = tmp_path / "flag", f"{ADDRESSES[0]}:5000"
    at = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address, "--dp-size", "2")
    with two_hosts() as hosts:
        parted = hosts.part(
            ["tests.nodes.front", address, str(flag), *FLAGS], ["moe_engine.launch_server", *at, *FLAGS], flag
        )
    report = parted.report
    assert report["lost"][0] == report["lost"][1]
    assert "engine core DP1 on " in report["lost"][0] and "is lost: node 1 (" in report["lost"][0]
    assert "silent for" in report["lost"][0]
    assert report["after"] == report["before"] and len(report["after"]) == 64
    assert f"Node 1 leaves: the leader at tcp://{ADDRESSES[0]}:5000 silent for" in parted.log
