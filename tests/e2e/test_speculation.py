"""Speculation in `meta_info`, /server_info, /metrics, and the log line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.usefixtures("forked_processes")

DEPTH = 3
QUESTIONS = [f"What is the {fact} of {place}?" for fact in ("capital", "currency") for place in ("France", "Peru")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tree = ["--speculative-num-steps", str(DEPTH), "--speculative-eagle-topk", "1"]
    flags = ["--speculative-algorithm", "NEXTN", *tree, "--speculative-num-draft-tokens", str(DEPTH + 1)]
    others = ["--enable-metrics", "--decode-log-interval", "4", "--max-total-tokens", "4096", "--dtype", "float32"]
    with ServerProcess(tmp_path_factory.mktemp("server"), *flags, *others) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server: ServerProcess) -> list[dict]:
    """Answers of /generate, all at once, greedy and complete."""
    with server.client() as client:
        body = {"text": QUESTIONS, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
        return client.post("/generate", json=body).raise_for_status().json()


def test_each_output_reports_its_drafts(answers: list[dict]) -> None:
    for answer in answers:
        meta = answer["meta_info"]
        steps, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == steps and sum(i * count for i, count in enumerate(histogram)) == correct
        assert meta["spec_accept_length"] == pytest.approx(1 + correct / steps)
        assert meta["spec_accept_rate"] == pytest.approx(correct / meta["spec_num_proposed_drafts"])
        assert len(answer["output_ids"]) == meta["completion_tokens"] == 24
        # the first token came with the prompt; drafts of a last step may reach beyond the end
        assert 0 <= steps + correct - 23 <= DEPTH
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0


def test_server_info(server: ServerProcess, answers: list[dict]) -> None:
    state = server.wait_idle()
    counts = state["speculation"]
    metas = [answer["meta_info"] for answer in answers]
    assert counts["verify_total"] == sum(meta["spec_verify_ct"] for meta in metas)
    assert sum(counts["accepted"]) == sum(meta["spec_num_correct_drafts"] for meta in metas)
    assert sum(counts["proposed"]) == sum(meta["spec_num_proposed_drafts"] for meta in metas)
    assert state["avg_spec_accept_length"] == pytest.approx(1 + sum(counts["accepted"]) / counts["verify_total"])
    assert len(state["spec_accept_rates"]) == DEPTH
    assert state["spec_accept_rates"] == sorted(state["spec_accept_rates"], reverse=True)
    with server.client() as client:
        info = client.get("/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_steps"]) == ("NEXTN", DEPTH)
    assert info["speculation"]["method"] == "nextn"


def test_metrics(server: ServerProcess, answers: list[dict]) -> None:
    state = server.wait_idle()
    with server.client() as client:
        page = client.get("/metrics").text
    values = dict(re.findall(r"^sglang:spec_(\w+)\{.*\} (\S+)$", page, re.MULTILINE))
    assert float(values["accept_length"]) == pytest.approx(state["avg_spec_accept_length"])
    assert 0 <= int(float(values["num_steps"])) <= DEPTH
    rates = re.findall(r'^sglang:spec_position_accept_rate\{.*position="(\d)".*\} (\S+)$', page, re.MULTILINE)
    assert {int(position): float(rate) for position, rate in rates} == pytest.approx(
        dict(enumerate(state["spec_accept_rates"], 1))
    )


def test_log_line(server: ServerProcess, answers: list[dict]) -> None:
    lines = re.findall(r"Decode batch\. .*accept len: (\d\.\d\d), cuda graph: ", server.log)
    assert lines and all(1 <= float(length) <= DEPTH + 1 for length in lines)
