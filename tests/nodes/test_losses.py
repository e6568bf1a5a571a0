"""Replicas over several nodes are lost: named, their requests told, the others serve on, exit codes."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.many_ranks.test_faults import PATIENCE, Ask, until
from tests.nodes.cluster import Cluster, cluster
from tests.ranks.drill import ended

LONG = 300


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def strike(
    running: Cluster, lane: int, others: tuple[int, ...], victims: list[psutil.Process], how: signal.Signals
) -> str:
    """Requests run on all lanes when it comes; those of `lane` are told the same sentence, which is returned, and the
    others get all their tokens."""
    server = running.server
    hit = [Ask(lane, 4 + i, LONG, again=True).send(server) for i in range(2)]
    spared = [Ask(other, 6, LONG).send(server) for other in others]
    until(lambda: all(ask.tokens > 1 or ask.fate for ask in (*hit, *spared)), server)
    for victim in victims:
        victim.send_signal(how)
    fates = {ask.fate_within(PATIENCE) for ask in hit}
    assert len(fates) == 1, fates
    assert [ask.fate_within(2 * PATIENCE) for ask in spared] == ["length"] * len(others)
    with server.client() as client:
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 3}}
        if others:
            assert client.get("/health").status_code == 200
            assert [client.post("/generate", json=body).status_code for _ in range(3)] == [200] * 3
            refused = client.post("/generate", json=body | {"routed_dp_rank": lane})
            assert refused.status_code == 503 and refused.json()["error"]["message"] in fates
    return fates.pop()


def test_replicas_over_two_nodes_each(tmp_path: Path) -> None:
    """One is lost by its core on the third node, the last by the silence of the second node. A silent node and the
    other going on: tests/nodes/test_cable.py."""
    with cluster(tmp_path, 4, "--dp-size", "2", "--tp-size", "2") as running:
        (core,) = running.node(2).ranks
        told = strike(running, 1, (0,), [core], signal.SIGKILL)
        assert "engine core DP1 on " in told and f"(pid {core.pid}) was killed by SIGKILL" in told
        staying = [running.node(rank).process.poll() for rank in (1, 2, 3)]
        assert staying == [None] * 3, "their going would end a cluster's step, and so the others"
        node = running.node(1)
        (follower,) = node.ranks
        held = [psutil.Process(node.process.pid), follower]
        told = strike(running, 0, (), held, signal.SIGSTOP)
        assert "silent for" in told
        assert running.server.process.wait(PATIENCE) == 1, running.logs
        assert [running.node(rank).process.wait(PATIENCE) for rank in (2, 3)] == [1] * 2, running.logs
        for process in held:
            process.resume()
        assert node.process.wait(PATIENCE) == 1, running.logs
        until(lambda: ended(follower), running.server)
