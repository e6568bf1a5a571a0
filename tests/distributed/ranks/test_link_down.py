"""The cable of a node is pulled: the unreachable rank is named within seconds, in its start and in a step (of prefill;
in
decode: test_rank_group.py), and both sides end."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.distributed.ranks.hosts import ADDRESSES, two_hosts, why_not
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.drawn(1)


@pytest.mark.parametrize("phase", ["load", "prefill"])
def test_rank_behind_a_pulled_cable_is_named(tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag, address = tmp_path / "flag", f"{ADDRESSES[0]}:5000"
    arguments = [str(make_checkpoint("deepseek_v3", tmp_path / "model", seed=31)), address, str(flag), phase]
    with two_hosts() as hosts:
        parted = hosts.part(
            ["tests.distributed.ranks.front", *arguments], ["tests.distributed.ranks.node", *arguments], flag
        )
    report, rank = parted.report, f"DP0 TP1 (pid {parted.flag} on {socket.gethostname()})"
    print(f"link down in {phase}: all had ended after {report['ended'] - parted.struck:.2f} s")
    print(f"  core: {report['cause']}", *(f"  request: {text}" for text in report["fates"]), sep="\n")
    assert f"{rank} silent for" in report["cause"]
    assert report["fates"] == ([] if phase == "load" else [report["cause"]] * 2)
    if phase == "load":
        assert re.search(rf"{re.escape(rank)} silent for \S+ s during startup", parted.log)
    assert "Node 1 exits: " in parted.log
