"""Greedy tokens of the whole engine equal transformers': 64 prompts of mixed lengths, 64 tokens each, in float32.

Each answer is checked by one forward pass of transformers over prompt and answer: if the best token at every position
is the engine's next token, greedy decoding by transformers gives the same answer.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint
from tests.models.routing import routed_logits

NUM_PROMPTS = 64
NUM_TOKENS = 64
TIE = 1e-5
"""Two best logits closer than this (relative) are a tie: both tokens are correct."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2", "deepseek_v2_lite", "llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint(kind, tmp_path / "model", seed=seed)
    script = [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=[rng.randrange(250) for _ in range(rng.choice([1, 2, 7, 16, 40, 100, 180]))],
            max_new_tokens=NUM_TOKENS,
            arrives=rng.randrange(60),
            sampling={"temperature": 0.0, "ignore_eos": True},
        )
        for i in range(NUM_PROMPTS)
    ]
    flags = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 24, "chunked_prefill_size": 64}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    try:
        answers = engine.run(script)
    finally:
        engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for item in script:
        check_greedy(model, item.prompt_ids, answers[item.rid].token_ids, f"{kind} seed {seed} {item.rid}")


def check_greedy(model: torch.nn.Module, prompt: list[int], tokens: list[int], where: str) -> None:
    assert len(tokens) == NUM_TOKENS, where
    logits, routed = routed_logits(model, prompt + tokens[:-1])
    logits = logits[len(prompt) - 1 :]
    best = logits.argmax(-1)
    for position, token in enumerate(tokens):
        if token != int(best[position]):
            gap = float(logits[position].max() - logits[position, token])
            scale = float(logits[position].abs().max())
            if gap > TIE * scale:  # otherwise both are correct; tokens after a tie of experts do not count either
                found = f"{where}: token {position} is {token}, not {int(best[position])}"
                assert position > routed - len(prompt), found
                return
