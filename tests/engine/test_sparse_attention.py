"""The whole engine with sparse attention (DeepSeek V3.2, GLM-5): greedy tokens and log-probabilities equal
transformers' in float32, for prompts up to 500 tokens with a top-k of 8, together and alone, cached and not, in chunks,
with retractions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.models import sparse
from tests.models.checkpoints import SPARSE_KINDS, make_checkpoint
from tests.models.routing import num_clear, observed_routers
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = pytest.mark.drawn(2)

VOCAB, ROWS = 250, 8
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 560, "max_running_requests": ROWS, "chunked_prefill_size": 64,
}  # fmt: skip
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=SPARSE_KINDS)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessEngine, torch.nn.Module]]:
    path = make_checkpoint(
        request.param, tmp_path_factory.mktemp("model"), random.randrange(2**31), max_position_embeddings=640
    )
    engine = InProcessEngine(path, tmp_path_factory.mktemp("status") / "status", **FLAGS)
    yield engine, sparse.load(path)
    engine.close()


TIER: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 3}
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4,
    "speculative_eagle_topk": 1,
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chain, host tier": ("deepseek_v32", {}, CHAIN | TIER),
    "chain that shares a selection": ("glm_moe_dsa", {"index_share_for_mtp_iteration": True}, CHAIN | {"page_size": 4}),
    "tree": ("glm_moe_dsa", {}, CHAIN | {"speculative_eagle_topk": 2}),
    "n-grams, host tier": ("deepseek_v32", {}, {"speculative_algorithm": "NGRAM"} | TIER),
}
"""Kind, fields of config.json, flags."""


def make_script(rng: random.Random, count: int) -> list[Scripted]:
    """Prompts below and beyond the top-k, some with common prefixes. The first requests fill all rows, and together
    outgrow the pool."""
    shared = [rng.randrange(VOCAB) for _ in range(500)]
    script = []
    for i in range(count):
        length = 40 if i < ROWS else 500 if i % 8 == 0 else rng.choice([1, 7, 8, 9, 63, 64, 65, 130])
        script.append(
            Scripted(
                f"r{i}",
                shared[:length] if i % 3 == 0 else [rng.randrange(VOCAB) for _ in range(length)],
                max_new_tokens=90 if i < ROWS else rng.choice([1, 12, 24]),
                arrives=0 if i < ROWS else rng.randrange(30),
                sampling={"temperature": 0.0, "ignore_eos": True},
                logprob=True,
            )
        )
    return script


def check(model: torch.nn.Module, script: list[Scripted], answers: dict[str, Answer], share: float = 0.3) -> None:
    """Each token is transformers' best one, with its log-probability, up to the first choice decided by rounding."""
    checked = wanted = 0
    for item in script:
        tokens, logprobs = answers[item.rid].token_ids, answers[item.rid].logprobs
        ids = item.prompt_ids + tokens[:-1]
        with observed_routers(model, len(ids)) as routed:
            logits, selected = sparse.logits_of(model, ids)
        count = max(0, min(selected, num_clear(routed)) - len(item.prompt_ids) + 1)
        scores = logits[len(item.prompt_ids) - 1 :].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:count, 0]
        assert chosen.tolist() == pytest.approx(scores[:count].max(-1).values.tolist(), abs=1e-5), item.rid
        got = [entry.logprob for entry in logprobs[:count]]
        assert got == pytest.approx(chosen.tolist(), abs=TOLERANCE), item.rid
        checked, wanted = checked + count, wanted + len(tokens)
    assert checked > share * wanted, f"{checked} of {wanted} tokens are clear"


def test_tokens_and_logprobs_equal_transformers(served: tuple[InProcessEngine, torch.nn.Module]) -> None:
    engine, model = served
    script = make_script(random.Random(random.randrange(2**31)), 24)
    answers = engine.run(script)
    check(model, script, answers)
    assert any(answer.cached_tokens for answer in answers.values())
    assert any(answer.retractions for answer in answers.values())
    some = script[:6]
    alone = {item.rid: engine.run([item])[item.rid] for item in some}
    check(model, some, alone)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_and_tiers(form: str, tmp_path: Path) -> None:
    """Sessions that return after their prefix was evicted, with drafts that are sometimes accepted."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    kind, fields, flags = FORMS[form]
    path = agreeing_checkpoint(kind, tmp_path / "model", seed, num_mtp_layers=1, **fields)
    script = []
    lengths = rng.sample([12, 40, 70, 70], 4)  # in total more than the pool: the first turns are evicted
    texts = [[rng.randrange(5, 60) for _ in range(length)] for length in lengths]
    for turn in range(2):
        for i, text in enumerate(texts):
            text += [rng.randrange(5, 60) for _ in range(6)]
            sampling = {"temperature": 0.0, "ignore_eos": True}
            arrives = 6 * len(script)
            script.append(Scripted(f"{i}.{turn}", list(text), 12, arrives, sampling=sampling, logprob=True))
    limits = {"dtype": "float32", "max_total_tokens": 160, "context_length": 128, "max_running_requests": 3}
    engine = InProcessEngine(path, tmp_path / "status", chunked_prefill_size=24, **limits, **flags)
    try:
        answers = engine.run(script)
        stats = engine.scheduler.stats()
    finally:
        engine.close()
    check(sparse.load(path), script, answers)
    assert stats.speculation.verify_total > 0
    assert flags["speculative_algorithm"] == "NGRAM" or sum(stats.speculation.accepted) > 0
    assert "enable_hierarchical_cache" not in flags or stats.host_hit_tokens_total > 0
