"""Bounded windows on several ranks: heads sharded over ranks, and a scheduler with a window pool for each rank; also of
KV in eight bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine import Engine
from tests.engine.test_fp8_windows import MODELS, check_rounded
from tests.engine.test_greedy_parity import NUM_TOKENS, check_greedy
from tests.engine.test_windows import ALTERNATING, FLAGS, load
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

DENSE: tuple[str, dict[str, Any]] = ("qwen3", ALTERNATING)
DP2: dict[str, Any] = {"tp_size": 2, "attn_dp_size": 2}
TRAVELS = {"ep_size": 2, "moe_a2a_backend": "all_to_all", "enable_two_batch_overlap": True}


@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(DENSE, {"tp_size": 2}, id="tp2"),
        pytest.param(DENSE, DP2, id="dp2", marks=pytest.mark.exhaustive),
        pytest.param(DENSE, {"dp_size": 2}, id="replicas", marks=pytest.mark.exhaustive),
        pytest.param(("mixtral", {}), DP2 | TRAVELS, id="ep2, two-batch overlap"),
    ],
)
def test_tokens_equal_transformers(model: tuple[str, dict[str, Any]], form: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    kind, fields = model
    path = make_checkpoint(kind, tmp_path / "model", seed=seed, **fields, sliding_window=9)
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [shared[: rng.choice([0, 40])] + [rng.randrange(250) for _ in range(30)] for _ in range(6)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
    with Engine(model_path=str(path), device="cpu", **FLAGS, **form) as engine:
        assert 0 < engine.config.num_window_slots < engine.config.max_total_num_tokens
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    oracle = load(path)
    for i, (prompt, output) in enumerate(zip(prompts, outputs)):
        check_greedy(oracle, prompt, output["output_ids"], f"seed {seed} prompt {i}")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", [{"tp_size": 2}, DP2], ids=["tp2", "dp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_in_eight_bits(kind: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most likely tokens, with the log-probabilities of transformers' model with keys and values rounded so. A rank
    that sums in another order may round another way: differences of logits change by up to 0.6."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = make_checkpoint(kind, tmp_path / "model", seed=seed, **MODELS[kind])
    prompts = [[rng.randrange(250) for _ in range(rng.choice([20, 70]))] for _ in range(6)]
    asked = {"sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}}
    asked |= {"return_logprob": True, "top_logprobs_num": 1}
    with Engine(model_path=str(path), device="cpu", kv_cache_dtype="fp8_e4m3", **FLAGS, **form) as engine:
        assert 0 < engine.config.num_window_slots < engine.config.max_total_num_tokens
        outputs: Any = engine.generate(input_ids=prompts, **asked)
    texts, got = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, meta = output["output_ids"], output["meta_info"]
        assert [best[0][1] for best in meta["output_top_logprobs"]] == tokens
        texts.append(prompt + tokens)
        got.append(torch.tensor([entry[0] for entry in meta["output_token_logprobs"]]))
    check_rounded(kind, "fp8_e4m3", path, texts, got, monkeypatch)
