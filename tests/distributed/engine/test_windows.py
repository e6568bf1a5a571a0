"""Bounded windows on several ranks: heads cut over ranks, and a scheduler with a pool of windows for each rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from tests.engine.test_greedy_parity import NUM_TOKENS, check_greedy
from tests.engine.test_windows import ALTERNATING, FLAGS, load
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.parametrize("form", [{"tp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}], ids=["tp2", "dp2"])
def test_tokens_equal_transformers(form: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint("qwen3", tmp_path / "model", seed=seed, **ALTERNATING, sliding_window=9)
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [shared[: rng.choice([0, 40])] + [rng.randrange(250) for _ in range(30)] for _ in range(6)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
    with Engine(model_path=str(path), device="cpu", **FLAGS, **form) as engine:
        assert 0 < engine.config.num_window_slots < engine.config.max_total_num_tokens
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    model = load(path)
    for i, (prompt, output) in enumerate(zip(prompts, outputs)):
        check_greedy(model, prompt, output["output_ids"], f"seed {seed} prompt {i}")
