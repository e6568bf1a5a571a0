"""The whole engine with block-sparse attention (MiniMax-M3): drafts of its MTP layers, the host tier and an FP8 cache,
for sessions that return after their prefix was evicted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.models.checkpoints import BLOCK_SPARSE
from tests.speculation.agreeing import agreeing_checkpoint

LIMITS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 160, "context_length": 128, "max_running_requests": 3,
    "chunked_prefill_size": 24, "enable_hierarchical_cache": True, "hicache_ratio": 3,
}  # fmt: skip
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4,
    "speculative_eagle_topk": 1,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, pages": {"page_size": 4},
    "eight bits": {"kv_cache_dtype": "fp8_e4m3"},
}


def sessions(rng: random.Random) -> list[Scripted]:
    script, texts = [], [[rng.randrange(5, 60) for _ in range(length)] for length in (12, 40, 70, 70)]
    for turn in range(2):
        for i, text in enumerate(texts):
            text += [rng.randrange(5, 60) for _ in range(6)]
            script.append(Scripted(f"{i}.{turn}", list(text), 12, 6 * len(script), sampling={"ignore_eos": True}))
    return script


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {rid: answer.token_ids for rid, answer in answers.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_and_the_host_tier_change_no_token(form: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    layers = 2 if "two" in form else 1
    path = agreeing_checkpoint(BLOCK_SPARSE, tmp_path / "model", seed, num_mtp_layers=layers)
    script, found = sessions(random.Random(seed)), []
    for drafts in ({}, CHAIN):
        engine = InProcessEngine(path, tmp_path / f"status{len(drafts)}", **LIMITS, **FORMS[form], **drafts)
        try:
            found.append(tokens(engine.run(script, host_tier_tokens=0)))
            found.append(tokens(engine.run(script)))
            stats = engine.scheduler.stats()
        finally:
            engine.close()
    assert all(answers == found[0] for answers in found[1:])
    assert stats.speculation is not None and sum(stats.speculation.accepted) > 0 and stats.host_hit_tokens_total > 0
