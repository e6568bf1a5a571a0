"""Two replicas on two nodes: the tokens of one rank, requests and calls for both, and the end of both by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from tests.many_ranks.test_faults import PATIENCE, Ask, until
from tests.nodes.cluster import FLAGS, Cluster, cluster

PROMPTS = [[5 + (11 * i + 3 * j) % 200 for j in range(4 + i)] for i in range(6)]
LENGTH = 20
LONG, ENDLESS = 300, 1900


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, dumps: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(dumps))
        flags = ("--dp-size", "2", "--expert-distribution-recorder-mode", "stat", "--enable-metrics")
        with cluster(tmp_path_factory.mktemp("nodes"), 2, *flags) as running:
            yield running


def sampling(i: int, **more: Any) -> dict[str, Any]:
    drawn = {"temperature": 0.9, "sampling_seed": 17 + i} if i % 2 else {"temperature": 0.0}
    return {"max_new_tokens": LENGTH, "ignore_eos": True, **drawn, **more}


def generate(pair: Cluster, i: int, **more: Any) -> dict[str, Any]:
    body = {"input_ids": PROMPTS[i], "sampling_params": sampling(i), **more}
    with pair.server.client() as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def states(pair: Cluster) -> list[dict[str, Any]]:
    with pair.server.client() as client:
        found: list[dict[str, Any]] = client.get("/server_info").json()["internal_states"]
    return found


def test_both_nodes_give_the_tokens_of_one_rank_and_share_the_load(pair: Cluster) -> None:
    flags = {name[2:].replace("-", "_"): value for name, value in zip(FLAGS[::2], FLAGS[1::2])}
    with Engine(**flags) as engine:
        alone = [engine.generate(input_ids=PROMPTS[i], sampling_params=sampling(i)) for i in range(len(PROMPTS))]
    expected = [answer["output_ids"] for answer in alone]  # type: ignore[call-overload]
    for lane in (0, 1):
        answers = [generate(pair, i, routed_dp_rank=lane) for i in range(len(PROMPTS))]
        assert [answer["output_ids"] for answer in answers] == expected
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {lane}
    before = [state["generation_tokens_total"] for state in states(pair)]
    assert before == [LENGTH * len(PROMPTS)] * 2
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda i: generate(pair, i % len(PROMPTS)), range(8)))
    assert {answer["meta_info"]["dp_rank"] for answer in together} == {0, 1}
    assert [answer["output_ids"] for answer in together] == [expected[i % len(PROMPTS)] for i in range(8)]
    after = [state["generation_tokens_total"] for state in states(pair)]
    assert all(now > then for now, then in zip(after, before)) and sum(after) - sum(before) == 8 * LENGTH


def test_state_metrics_and_cache_are_of_both(pair: Cluster) -> None:
    for lane in (0, 1):
        generate(pair, 5, routed_dp_rank=lane)
    assert [generate(pair, 5, routed_dp_rank=lane)["meta_info"]["cached_tokens"] > 0 for lane in (0, 1)] == [True] * 2
    with pair.server.client() as client:
        assert client.get("/health").status_code == 200
        assert len(client.get("/v1/loads").json()["loads"]) == 2
        assert "sglang:num_alive_schedulers 2" in unlabelled(client.get("/metrics").text)
        assert client.post("/flush_cache").status_code == 200
    assert [generate(pair, 5, routed_dp_rank=lane)["meta_info"]["cached_tokens"] for lane in (0, 1)] == [0, 0]


def unlabelled(page: str) -> str:
    lines = (line.partition("{")[0] + " " + line.split()[-1] for line in page.splitlines() if "{" in line)
    return "\n".join(f"{name} {float(value):g}" for name, value in (line.split() for line in lines))


def test_an_abort_reaches_the_other_node(pair: Cluster) -> None:
    asked = [Ask(lane, 8, ENDLESS).send(pair.server) for lane in (0, 1)]
    until(lambda: all(ask.tokens > 1 or ask.fate for ask in asked), pair.server)
    with pair.server.client() as client:
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
    for ask in asked:  # one that was quicker than the abort is whole
        assert ask.fate_within(PATIENCE) in ("length", "Abort in /abort_request")
        assert (ask.fate == "length") == (ask.tokens == ENDLESS)
    until(lambda: all(state["num_running"] == 0 for state in states(pair)), pair.server)


def test_a_dump_holds_what_both_nodes_recorded(pair: Cluster, dumps: Path) -> None:
    def record(lanes: tuple[int, ...]) -> torch.Tensor:
        with pair.server.client() as client:
            client.post("/start_expert_distribution_record").raise_for_status()
            for lane in lanes:
                generate(pair, 4, routed_dp_rank=lane)
            client.post("/flush_cache").raise_for_status()
            answer = client.post("/dump_expert_distribution_record")
        assert (answer.status_code, answer.text) == (200, "Dump expert distribution record.\n")
        (path,) = dumps.iterdir()
        counts: torch.Tensor = torch.load(path, weights_only=True)["logical_count"].sum(0)
        path.unlink()
        return counts

    with pair.server.client() as client:
        client.post("/flush_cache").raise_for_status()
    near, far = record((0,)), record((1,))
    assert near.sum() > 0 and torch.equal(near, far)
    assert torch.equal(record((0, 1)), near + far)


def test_sigterm_to_all_nodes_drains_both(pair: Cluster) -> None:
    """As a cluster's scheduler sends it. The last of this file: nothing is left to serve."""
    asked = [Ask(lane, 8, LONG).send(pair.server) for lane in (0, 1)]
    until(lambda: all(ask.tokens > 1 or ask.fate for ask in asked), pair.server)
    for process in (pair.node(1).process, pair.server.process):
        process.send_signal(signal.SIGTERM)
    assert [ask.fate_within(2 * PATIENCE) for ask in asked] == ["length"] * 2
    assert [ask.tokens for ask in asked] == [LONG] * 2
    assert pair.server.process.wait(PATIENCE) == 0, pair.logs
    assert pair.node(1).process.wait(PATIENCE) == 0, pair.logs
    assert "go on with" not in pair.logs and "Serving goes on" not in pair.logs
