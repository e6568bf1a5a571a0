"""The whole engine over models with sliding windows: tokens equal transformers' far beyond the window."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.harness import InProcessEngine, Scripted
from tests.engine.test_greedy_parity import NUM_TOKENS, check_greedy
from tests.models.checkpoints import make_checkpoint

ALTERNATING = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("mistral", {"sliding_window": 24}),
    "alternating": ("qwen3", {**ALTERNATING, "sliding_window": 9}),
}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}


@pytest.mark.parametrize("more", [{}, {"disable_radix_cache": True}, NGRAM], ids=["plain", "no radix cache", "ngram"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Shared prefixes, chunked prompts, retractions (the pool is small) and, with n-grams, repetitive texts."""
    kind, fields = MODELS[name]
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint(kind, tmp_path / "model", seed=seed, **fields)
    shared, phrase = ([rng.randrange(250) for _ in range(length)] for length in (70, 6))
    script = [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=shared[: rng.choice([0, 30, 70])] + phrase * rng.choice([1, 5]) + [rng.randrange(250)],
            max_new_tokens=NUM_TOKENS,
            arrives=rng.randrange(40),
            sampling={"temperature": 0.0, "ignore_eos": True},
        )
        for i in range(12)
    ]
    flags = {"dtype": "float32", "max_total_tokens": 700, "max_running_requests": 8, "chunked_prefill_size": 32}
    engine = InProcessEngine(path, tmp_path / "status", **flags, **more)
    try:
        assert engine.config.context_len > fields["sliding_window"]
        answers = engine.run(script)
    finally:
        engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for item in script:
        check_greedy(model, item.prompt_ids, answers[item.rid].token_ids, f"{name} seed {seed} {item.rid}")
