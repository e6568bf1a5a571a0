"""GGUF files of drawn families and block types on two ranks: the greedy tokens of transformers on the values that the
types define."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from tests.engine.test_greedy_parity import NUM_TOKENS, check_greedy
from tests.engine.test_windows import load
from tests.models.test_gguf import FAMILIES, WIDE, write_both

pytestmark = pytest.mark.usefixtures("forked_processes")

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 8, "chunked_prefill_size": 32,
    "skip_tokenizer_init": True,
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 6))])
def test_tokens_equal_transformers(tmp_path: Path, number: int) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind, main, other = rng.choice(FAMILIES), *rng.sample([*BLOCK_TYPES], 2)
    widths = WIDE | {"intermediate_size": rng.choice([256, 512])}
    if kind in MIXTURES and kind != "mixtral":
        widths |= {"moe_intermediate_size": rng.choice([256, 512])}
    path, plain = write_both(tmp_path, kind, lambda name: rng.choice([main, main, main, other]), **widths)
    form: dict[str, Any] = {"tp_size": 2}
    if kind in MIXTURES:
        form |= rng.choice([{}, {"ep_size": 2}, {"attn_dp_size": 2, "moe_a2a_backend": "shared_memory"}])
    prompts = [[rng.randrange(250) for _ in range(rng.choice([3, 20, 70]))] for _ in range(6)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
    with Engine(model_path=str(path), device="cpu", **FLAGS, **form) as engine:
        assert engine.config.model.weight_format.name == "gguf"
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=sampling)
    oracle = load(plain)
    for prompt, output in zip(prompts, outputs):
        check_greedy(oracle, prompt, output["output_ids"], f"seed {seed} {kind} {main} {other} {form}")
