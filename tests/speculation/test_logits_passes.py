"""Logits computed and sampled in several passes: the same answers as in one pass, with every drafter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe_engine.worker.sampling.logits_passes import Head, LogitsPasses, Work
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

ORDINARY = 250
TORCH = dict.fromkeys(("attention_backend", "moe_runner_backend", "linear_backend", "ops_backend"), "torch")
LOSSY = {"speculative_accept_threshold_single": 0.3, "speculative_accept_threshold_acc": 0.6}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "nextn chain": {"speculative_algorithm": "NEXTN", **CHAIN},
    "nextn tree": {"speculative_algorithm": "NEXTN", **TREE},
    "standalone chain": {"speculative_algorithm": "STANDALONE", **CHAIN},
    "standalone tree": {"speculative_algorithm": "STANDALONE", **TREE},
    "ngram": {"speculative_algorithm": "NGRAM"},
    "nextn chain, lossy": {"speculative_algorithm": "NEXTN", **CHAIN, **LOSSY},
    "standalone tree, lossy": {"speculative_algorithm": "STANDALONE", **TREE, **LOSSY},
}
SAMPLE = ("none", "ngram", "nextn chain", "standalone tree, lossy")
"""Every algorithm, chains and trees, exact and lossy acceptance."""
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {"7": 4.0, "9": -100}, "min_new_tokens": 6},
    {"temperature": 1.2},
]


class Counting(LogitsPasses):
    """Records the rows of every pass."""

    def over(self, head: Head, hidden: Tensor, sizes: Any, work: Work) -> list:
        def noted(part: slice, logits: Tensor) -> Any:
            seen.append(len(logits))
            return work(part, logits)

        return super().over(head, hidden, sizes, noted)


seen: list[int] = []


def script(seed: int) -> list[Scripted]:
    pick = random.Random(seed)
    script = []
    for i in range(12):
        prompt = [pick.randrange(ORDINARY) for _ in range(pick.randint(2, 24))]
        more: dict[str, Any] = {}
        if i % 3 == 1:
            more = {"top_logprobs": 3, "token_ids_logprob": [5, 6], "logprob_start": pick.choice([None, 0, 1])}
        script.append(
            Scripted(
                f"r{i}", prompt + prompt[: pick.randint(0, 12)], pick.randint(6, 20), pick.randrange(8), None,
                WISHES[i % len(WISHES)], seed=pick.getrandbits(40), logprob=i % 3 > 0, more=more,
            )
        )  # fmt: skip
    return script


def _same(found: list[Any], expected: list[Any]) -> bool:
    """`tests.logprobs.Entry` of each token."""
    for got, want in zip(found, expected, strict=True):
        values = [[e.logprob or 0.0, *(value for _, value in e.top), *e.asked] for e in (got, want)]
        if got.token_id != want.token_id or values[0] != pytest.approx(values[1], abs=1e-4):
            return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("passes")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.exhaustive) for name in DRAFTERS]
)
def test_same_answers_however_many_rows_fit(folder: Path, drafter: str) -> None:
    flags = dict(DRAFTERS[drafter])
    name = drafter.replace(" ", "-")
    if flags.get("speculative_algorithm") == "STANDALONE":
        flags["speculative_draft_model_path"] = str(agreeing_checkpoint("deepseek_v2", folder / f"{name}-draft", 4))
    path = agreeing_checkpoint("deepseek_v3", folder / name, 4, num_mtp_layers=1)
    engine = InProcessEngine(
        path, folder / "board", dtype="float32", cpu_threads=1, page_size=1, max_total_tokens=1024,
        max_running_requests=8, chunked_prefill_size=16, **TORCH, **flags,
    )  # fmt: skip
    sampler, requests = engine.worker.runner.sampler, script(8)
    assert sampler.passes.rows_at_once == engine.config.ledger.logits_rows
    answers: dict[int, dict[str, Answer]] = {}
    try:
        for rows_at_once in (1 << 30, 7, 2):
            sampler.passes = Counting(rows_at_once)
            seen.clear()
            answers[rows_at_once] = engine.run(requests)
            assert max(seen) == min(rows_at_once, max(seen)) and (rows_at_once > 7 or seen.count(rows_at_once) > 5)
    finally:
        engine.close()
    expected = answers[1 << 30]
    for rows_at_once in (7, 2):
        for rid, want in expected.items():
            got = answers[rows_at_once][rid]
            assert (got.token_ids, got.finish) == (want.token_ids, want.finish), (rid, rows_at_once)
            assert _same(got.logprobs, want.logprobs) and _same(got.prompt_logprobs, want.prompt_logprobs), rid
    assert any(answer.prompt_logprobs for answer in expected.values())
