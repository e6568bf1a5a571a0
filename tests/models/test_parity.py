"""Logits equal those of transformers' own models, on random tiny checkpoints of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import stepper
from tests.models.checkpoints import KINDS, LLAMA3_ROPE, MORE_KINDS, PHI_ROPE, YARN
from tests.models.conftest import Oracle
from tests.models.rows import all_rows
from tests.models.stepper import Chunk, Stepper

MakeOracle = Callable[..., Oracle]
ROWS = all_rows()
MLA_KINDS = [kind for kind in KINDS if kind.startswith("deepseek")]
every_row = pytest.mark.parametrize("row", ROWS)


def assert_close(got: Tensor, want: Tensor, relative: float = 1e-4) -> None:
    """All rows together and the worst row are near, relative to the magnitude of the logits."""
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < relative, f"relative error {error.max():.2e} at token {error.argmax()}"


def whole(model: Stepper, tokens: list[int], sequence: int = 0, decode: bool = False) -> Tensor:
    return model.step([Chunk(sequence, tokens, decode)])[0]


@every_row
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
def test_whole_prompt(oracle: MakeOracle, kind: str, row: str) -> None:
    want = oracle(kind)
    assert_close(whole(stepper.load(want.path, row), want.tokens), want.logits)


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_chunked_prefill_then_decode(oracle: MakeOracle, kind: str, row: str) -> None:
    want = oracle(kind)
    model, tokens = stepper.load(want.path, row, seed=1), want.tokens
    got = [whole(model, tokens[:37]), whole(model, tokens[37:60])]
    got += [whole(model, [token], decode=True) for token in tokens[60:80]]
    got += [whole(model, tokens[80:84], decode=True), whole(model, tokens[84:])]
    assert_close(torch.cat(got), want.logits)


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2_lite", "llama", "qwen3"])
def test_mixed_batch(oracle: MakeOracle, kind: str, page_size: int, row: str) -> None:
    """Prefill, chunks, decode and several tokens at once, of sequences of different lengths in one step."""
    want = oracle(kind)
    model, tokens = stepper.load(want.path, row, seed=2, page_size=page_size), want.tokens
    steps: tuple[Any, ...] = (
        ((0, 1, False), (1, 40, False)),
        ((0, 1, True), (2, 5, False), (1, 3, True), (3, 70, False)),
    )
    steps += (((3, 20, False), (1, 47, False), (2, 1, True), (0, 2, True)),)
    for got in model.run(tokens, steps):
        assert_close(got, want.logits[: len(got)])


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize("kind", MLA_KINDS)
def test_bounded_expansion(oracle: MakeOracle, kind: str, row: str) -> None:
    """Prefill in parts, and contexts beyond the limit in the absorbed form: the same logits."""
    want = oracle(kind)
    tokens = want.tokens
    model = stepper.load(want.path, row, max_expanded_tokens=48)
    first = model.step([Chunk(i, tokens[: 20 + i], False) for i in range(4)])
    second = model.step(
        [Chunk(0, tokens[20:], False), Chunk(3, tokens[23:24], True)]
        + [Chunk(i, tokens[20 + i : 30 + i], False) for i in (1, 2)]
    )
    assert_close(torch.cat((first[0], second[0])), want.logits)
    assert_close(torch.cat((first[1], second[2])), want.logits[:31])
    assert_close(torch.cat((first[2], second[3])), want.logits[:32])
    assert_close(torch.cat((first[3], second[1])), want.logits[:24])


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize(("mscale", "all_dim"), [(0.707, 0.707), (1.0, 0.5), (None, None)])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_yarn(oracle: MakeOracle, kind: str, mscale: float | None, all_dim: float | None, row: str) -> None:
    scaling = {key: value for key, value in YARN.items() if "mscale" not in key} | {"factor": 40.0}
    if mscale is not None:
        scaling |= {"mscale": mscale, "mscale_all_dim": all_dim}
    want = oracle(kind, rope_scaling=scaling)
    model = stepper.load(want.path, row)
    assert_close(torch.cat((whole(model, want.tokens[:80]), whole(model, want.tokens[80:], decode=True))), want.logits)


LONGROPE: dict[str, Any] = {
    "type": "longrope", "original_max_position_embeddings": 32,
    "long_factor": [1.0, 1.3, 2.0, 3.1, 4.6, 6.0, 7.7, 9.0], "short_factor": [1.0, 1.02, 1.1, 1.15, 1.3, 1.4, 1.7, 2.0],
}  # fmt: skip
PHI: dict[str, Any] = {
    "type": "longrope", **{name: LONGROPE[name][:6] for name in ("long_factor", "short_factor")},
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_scaling": None}),
    ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.3}}),
    ("deepseek_v3", {"rope_scaling": {"type": "dynamic", "factor": 4.0, "mscale_all_dim": 1.3}}),
    ("deepseek_v3", {"rms_norm_eps": 1e-2}),  # the latent norms stay at 1e-6
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"qk_rope_head_dim": 64}),
    ("deepseek_v3", {"tie_word_embeddings": True}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v2_lite", {"attention_bias": True}),
    ("deepseek_v3", {"n_shared_experts": 0}),
    ("deepseek_v2", {"norm_topk_prob": False, "topk_method": "greedy"}),
    ("deepseek_v2", {"mlp_bias": True, "first_k_dense_replace": 3}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {**LLAMA3_ROPE, "factor": 32.0}, "num_key_value_heads": 4}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("llama", {"rope_scaling": LONGROPE, "head_dim": 16}),
    ("llama", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 512}, "head_dim": 16}),
    ("qwen3", {"rope_scaling": {**LONGROPE, "factor": 8.0, "attention_factor": 1.3}, "head_dim": 16}),
    ("phi3", {"rope_scaling": PHI, "original_max_position_embeddings": 32, "sliding_window": 20}),
    ("phi3", {"rope_scaling": PHI, "original_max_position_embeddings": 512}),
    (
        "phimoe",
        {"rope_scaling": PHI_ROPE | {"original_max_position_embeddings": 512, "long_factor": [1.0] * 8}}
        | {"original_max_position_embeddings": 512, "sliding_window": 20, "tie_word_embeddings": True},
    ),
    ("phimoe", {"rope_scaling": None, "lm_head_bias": False, "attention_bias": False, "router_jitter_noise": 0.01}),
    ("dots1", {"sliding_window": 20, "max_window_layers": 1, "n_shared_experts": 1}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "tie_word_embeddings": False}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2], "rope_scaling": None, "attention_bias": True}),
    ("ministral3", {"sliding_window": 20}),
    ("olmo3", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {**YARN, "rope_type": "yarn"}}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
]


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "overrides"), VARIANTS, ids=[f"{k}-{'-'.join(o)}" for k, o in VARIANTS])
def test_variants(oracle: MakeOracle, kind: str, overrides: dict[str, Any], row: str) -> None:
    want = oracle(kind, seed=5, **overrides)
    model = stepper.load(want.path, row)
    assert_close(torch.cat((whole(model, want.tokens[:70]), whole(model, want.tokens[70:], decode=True))), want.logits)


MLA_SHAPES: list[dict[str, Any]] = [
    {"num_attention_heads": 5, "kv_lora_rank": 24, "qk_rope_head_dim": 32, "qk_nope_head_dim": 48, "v_head_dim": 20}
    | {"hidden_size": 100, "vocab_size": 317, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 8, "n_shared_experts": 3, "q_lora_rank": 88},
    {"num_attention_heads": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 24, "v_head_dim": 128}
    | {"hidden_size": 60, "vocab_size": 333, "moe_intermediate_size": 24, "n_routed_experts": 12, "n_group": 6}
    | {"topk_group": 5, "num_experts_per_tok": 1, "q_lora_rank": None, "first_k_dense_replace": 0},
    {"num_attention_heads": 1, "kv_lora_rank": 40, "qk_rope_head_dim": 4, "qk_nope_head_dim": 128, "v_head_dim": 8}
    | {"hidden_size": 136, "intermediate_size": 72, "first_k_dense_replace": 3, "q_lora_rank": 12},
]


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize("shape", MLA_SHAPES, ids=["wide", "latent512", "dense"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_unusual_shapes(oracle: MakeOracle, kind: str, shape: dict[str, Any], row: str) -> None:
    """Odd head counts and widths that no vector, tile or block divides."""
    want = oracle(kind, seed=11, num_key_value_heads=shape["num_attention_heads"], **shape)
    model = stepper.load(want.path, row, page_size=16, seed=4)
    got = [whole(model, want.tokens[:31]), whole(model, want.tokens[31:80])]
    got += [whole(model, [token], decode=True) for token in want.tokens[80:]]
    assert_close(torch.cat(got), want.logits)


FP8_DIMS = {
    "hidden_size": 192,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "kv_lora_rank": 144,
    "q_lora_rank": 72,
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
}


@every_row
@pytest.mark.each_value
@pytest.mark.parametrize("scale_dtype", ["float32", "e8m0", "uint8"])
def test_fp8_blocks(oracle: MakeOracle, scale_dtype: str, row: str) -> None:
    """Dimensions that no block divides; the fused q_a + kv_a and gate + up have block edges inside."""
    want = oracle("deepseek_v3", fp8=True, scale_dtype=scale_dtype, max_shard_bytes=150_000, **FP8_DIMS)
    model = stepper.load(want.path, row)
    assert_close(torch.cat((whole(model, want.tokens[:70]), whole(model, want.tokens[70:], decode=True))), want.logits)


@every_row
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3"])
def test_bfloat16_stays_near(oracle: MakeOracle, kind: str, row: str) -> None:
    want = oracle(kind)
    model = stepper.load(want.path, row, dtype="bfloat16")
    got = torch.cat((whole(model, want.tokens[:70]), whole(model, want.tokens[70:], decode=True)))
    error = (got - want.logits).norm(dim=-1) / want.logits.norm(dim=-1)
    assert error.median() < 0.05


@pytest.mark.parametrize("row", [row for row in ROWS if "cpu" in row.values])  # type: ignore[attr-defined]
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3"])
def test_same_bits_alone_and_in_company(oracle: MakeOracle, kind: str, row: str) -> None:
    """For rows that guarantee it: a decoded token does not depend on the rest of the step."""
    want = oracle(kind)
    tokens = want.tokens
    alone, company = stepper.load(want.path, row, seed=1), stepper.load(want.path, row, seed=2)
    first = [whole(alone, tokens[:20])] + [whole(alone, [token], decode=True) for token in tokens[20:24]]
    others = [Chunk(1, tokens[:33], False), Chunk(2, tokens[5:7], False)]
    second = [company.step([Chunk(0, tokens[:20], False), *others])[0]]
    for i in range(20, 24):
        second.append(company.step([Chunk(1, [i], True), Chunk(0, [tokens[i]], True), Chunk(2, [7] * i, False)])[1])
    assert torch.equal(torch.cat(first), torch.cat(second))


@every_row
@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_empty_step(oracle: MakeOracle, kind: str, row: str) -> None:
    """A rank without work still runs its step."""
    model = stepper.load(oracle(kind).path, row)
    batch = model.batch([])
    hidden = model.model.forward(batch)
    assert hidden.shape == (0, model.config.hidden_size)
    assert model.model.logits(hidden).shape == (0, model.config.vocab_size)
