"""smoke.sbatch, unchanged, under a real slurmctld: a good cluster passes, a bad link or node is named."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.drawn(1, group="slurm jobs")


@pytest.mark.parametrize(
    ("nodes", "flags", "engine"),
    [pytest.param(2, ["--no-engine"], "run", marks=pytest.mark.exhaustive), (2, [], "ok")],
)
def test_smoke_ends_with_ok(cluster, nodes, flags, engine):
    job = cluster.submit("smoke.sbatch", *flags, nodes=nodes)
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    lines = job.log.splitlines()
    assert lines[-1] == "OK"
    rows = [line.split() for line in lines if re.match(r"node\d ", line)]
    expected = [(f"node{rank + 1}", str(rank), engine, "ok") for rank in range(nodes)]
    assert [(*row[:2], *row[-2:]) for row in rows] == expected


def test_smoke_names_a_broken_link(cluster):
    cluster.cut("node2", "node3")
    try:
        job = cluster.submit("smoke.sbatch", nodes=3)
        facts = job.ended()
    finally:
        cluster.heal()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0")
    named = set(re.findall(r"^FAILED link (\S+ -> \S+) at 10\.77\.0\.\d+:\d+: no answer within 3 s$", job.log, re.M))
    assert named == {"node2 -> node3", "node3 -> node2"}, job.log
    assert "NOT OK: 2 problems" in job.log


def test_smoke_names_a_link_that_is_closed_in_one_direction(cluster):
    """A firewall on node 1 that blocks node 2's connection to the rendezvous."""
    rule = "add table inet f; add chain inet f in { type filter hook input priority 0; }; "
    rule += "add rule inet f in ip saddr 10.77.0.12 tcp dport 20000-29999 reject with tcp reset"
    cluster.run("nft", rule, host="node1")
    try:
        job = cluster.submit("smoke.sbatch", "--join-timeout", "3", nodes=2)
        facts = job.ended()
    finally:
        cluster.run("nft", "delete table inet f", host="node1")
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "1:0")
    assert "FAILED node2: did not join within 3 s" in job.log
    assert re.search(r"FAILED node 1 \(node2\) cannot reach node 0 at node1:2\d{4}: connection refused", job.log)
