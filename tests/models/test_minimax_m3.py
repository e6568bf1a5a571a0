"""MiniMax-M3's text model: logits equal transformers' beyond the selected blocks, in every form of a step; the
published file in both dialects, sizes, headers, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError, NotAvailableYet
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.models import sizes, step_memory
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.needs import need_of_model
from moe_engine.parallel.topology import Topology
from moe_engine.planning.model.sparse_attention import check_sparse
from moe_engine.planning.resolve import resolve
from moe_engine.tuning.costs.model_facts import model_facts
from tests.config.conftest import machine
from tests.models import sparse, stepper
from tests.models.checkpoints import BLOCK_SPARSE, make_checkpoint, write_tensors
from tests.models.conftest import Oracle
from tests.models.parameters import num_active_parameters
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close, whole

MakeOracle = Callable[..., Oracle]
every_row = pytest.mark.parametrize("row", all_rows())
SPARSE = [0] * 3 + [1] * 57
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
    "image_token_index": 200025, "vision_config": {"hidden_size": 1280, "num_hidden_layers": 32},
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": 6144, "intermediate_size": 3072,
        "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_hidden_layers": 60,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 200064,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "use_gemma_norm": True, "rope_theta": 5000000,
        "rotary_dim": 64, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "use_qk_norm": True,
        "qk_norm_type": "per_head", "attention_output_gate": False, "tie_word_embeddings": False,
        "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
        "use_routing_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "routed_scaling_factor": 2.0,
        "moe_layer_freq": SPARSE, "num_mtp_modules": 7, "torch_dtype": "bfloat16", "eos_token_id": 200020,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value": SPARSE,
            "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": SPARSE,
        },
    },
}  # fmt: skip


def parse(folder: Path, text: dict[str, Any] | None = None, sparse: dict[str, Any] | None = None) -> ModelConfig:
    fields = json.loads(json.dumps(PUBLISHED))
    fields["text_config"] |= text or {}
    fields["text_config"]["sparse_attention_config"] |= sparse or {}
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model_config(folder)


@every_row
def test_logits_equal_transformers(oracle: MakeOracle, row: str) -> None:
    """A whole prompt of twelve blocks, of which three are selected; chunks, decodes, several tokens of a decode."""
    want = oracle(BLOCK_SPARSE)
    assert_close(whole(stepper.load(want.path, row), want.tokens), want.logits)
    model, tokens = stepper.load(want.path, row, seed=1, page_size=4), want.tokens
    assert_close(sparse.in_parts(model, tokens), want.logits)


@every_row
def test_mixed_batches(oracle: MakeOracle, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences below and beyond the selection in one step, decodes and prompts, prompts in parts."""
    monkeypatch.setattr("moe_engine.models.layers.attention.block_chunks.MAX_TOKENS", 16)
    want = oracle(BLOCK_SPARSE)
    model, tokens = stepper.load(want.path, row, seed=2), want.tokens
    for got in model.run(tokens, sparse.MIXED_STEPS):
        assert_close(got, want.logits[: len(got)])


VARIANTS: list[dict[str, Any]] = [
    {"dialect": "transformers"},
    {"moe_layer_freq": [1, 0, 1], "num_key_value_heads": 1, "sparse_attention_config": {
        "sparse_attention_freq": [1, 1, 0], "sparse_num_index_heads": 1, "sparse_index_dim": 24,
        "sparse_block_size": 5, "sparse_topk_blocks": 6, "sparse_local_block": 3}},
    {"swiglu_alpha": 0.9, "swiglu_limit": 0.4, "routed_scaling_factor": 1.3, "shared_intermediate_size": 40},
    {"sparse_attention_config": None, "rms_norm_eps": 1e-2},
]  # fmt: skip


@pytest.mark.parametrize("fields", VARIANTS, ids=["transformers", "blocks", "activation", "dense"])
def test_variants(oracle: MakeOracle, fields: dict[str, Any]) -> None:
    want = oracle(BLOCK_SPARSE, seed=3, **fields)
    model = stepper.load(want.path, "cpu", page_size=16)
    got = torch.cat((whole(model, want.tokens[:50]), whole(model, want.tokens[50:], decode=True)))
    assert_close(got, want.logits)


def test_a_cache_in_fp8_selects_the_same_blocks(oracle: MakeOracle) -> None:
    """Index keys are bfloat16 in the bytes of the cache: with keys and values unchanged by FP8, so are the logits."""
    want = oracle(BLOCK_SPARSE)
    exact, found = stepper.load(want.path, "torch"), stepper.load(want.path, "torch")
    for layer, parts in enumerate(found.kv[1:], 1):
        index = torch.zeros(found.num_slots, 1, 32, dtype=torch.uint8)
        found.kv[layer] = (*parts[:2], index)
        exact.kv[layer][2].zero_()
    got = whole(found, want.tokens)
    whole(exact, want.tokens)
    for ours, theirs in zip(found.kv[1:], exact.kv[1:]):
        assert torch.equal(ours[2].view(torch.bfloat16).float(), theirs[2].bfloat16().float())
    assert (got - want.logits).norm(dim=-1).median() < 1e-4 * want.logits.norm(dim=-1).median()
    config = found.config
    assert config.kv_parts(1, "fp8_e4m3") == ((2, 28), (2, 28), (1, 32)) and len(config.kv_parts(0, "fp8_e4m3")) == 2


def tower_parameters() -> int:
    """32 blocks of width 1280, and a projector of 6144 channels."""
    block = 4 * (1280 * 1280 + 1280) + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280
    projector = 6144 * (1280 + 6144 + 4 * 6144 + 6144 + 4)
    return 32 * block + projector + 1280 * 3 * 2 * 14 * 14 + 2 * 1280


def test_the_published_model(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert sizes.num_parameters(config) == pytest.approx(427e9, rel=5e-3)
    assert sizes.num_parameters(config) - sizes.num_parameters(replace(config, vision=None)) == tower_parameters()
    config = replace(config, vision=None)
    assert num_active_parameters(config) - 200064 * 6144 == pytest.approx(23e9, rel=3e-2)
    facts = model_facts(PUBLISHED)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 2e6
    assert [(kind.layers, kind.limit, kind.index_bytes) for kind in facts.attention] == [(3, 0, 0), (57, 2048, 256)]
    assert config.kv_bytes_per_token("bfloat16") == 2 * (60 * 2 * 4 * 128 + 57 * 128)
    assert config.kv_bytes_per_token("fp8_e4m3") == 60 * 2 * 4 * 132 + 57 * 256
    attention, moe = config.attention, config.moe
    assert isinstance(attention, GQAConfig) and attention.blocks is not None and moe is not None
    assert attention.blocks.rule == BlockRule(128, 16, 1) and attention.shared_layers == (0, 1, 2)
    assert config.moe_layers == (False,) * 3 + (True,) * 57 and config.intermediate_size == 12288
    assert (moe.scale, moe.alpha, moe.limit, moe.has_bias, moe.shared_width) == (2.0, 1.702, 7.0, True, 3072)
    assert config.norm_plus == 1 and config.rope.width == 64 and config.rope.theta == 5e6
    need = need_of_model(config, "bfloat16")
    assert need.biases and not need.clamped and need.most_selected == 2048
    tp8 = sizes.weight_bytes(config, 2, topology=Topology(8, ep_size=8))
    assert tp8 == pytest.approx(2 * sizes.num_parameters(config) / 8, rel=0.03)
    dense = replace(config, attention=replace(attention, blocks=None))
    selected = step_memory.largest_step_activation_bytes(config, 64, 2) - step_memory.largest_step_activation_bytes(
        dense, 64, 2
    )
    assert selected >= 64 * 4 * 2048 * 4, "each KV head has slots of its own"
    names = {**PUBLISHED["text_config"]}
    del names["sparse_attention_config"], names["moe_layer_freq"], names["rope_theta"], names["partial_rotary_factor"]
    names |= {"hidden_act": "silu", "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    names |= {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57}
    names |= {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57}
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, "text_config": names}))
    saved = load_model_config(tmp_path)
    assert saved.attention == attention and saved.moe == moe and saved.rope == config.rope


@pytest.mark.parametrize(
    ("text", "sparse", "message"),
    [
        ({"partial_rotary_factor": None}, {}, r"rotary_dim 64 has no partial_rotary_factor with it; add .*: 0.5"),
        ({"qk_norm_type": "per_layer"}, {}, r"qk_norm_type 'per_layer' is not supported.*supported: per_head"),
        ({"swiglu_beta": 0.5}, {}, "swiglu_beta 0.5 is not supported"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported.*swigluoai, silu"),
        ({"attention_output_gate": True}, {}, "attention_output_gate True is not supported"),
        ({"moe_layer_freq": [1]}, {}, "moe_layer_freq needs a list of 60"),
        ({"layer_types": ["mamba"] * 60}, {}, "layer_types needs 60 of full_attention, minimax_m3_sparse"),
        ({"num_key_value_heads": 8}, {}, "index_n_heads 4 is not num_key_value_heads 8"),
        ({"index_topk_freq": 4}, {}, "index_topk_freq 4: layers that share the selection of another layer"),
        ({}, {"sparse_index_dim": 32}, "index_head_dim 32 is less than the 64 rotated channels"),
        ({}, {"sparse_init_block": 1}, "sparse_init_block is not 0"),
        ({}, {"sparse_score_type": "mean"}, "sparse_score_type 'mean' is not supported"),
        ({}, {"sparse_attention_freq": [1, 2] * 30}, "sparse_attention_freq needs 60 of 0 and 1"),
        ({}, {"sparse_disable_index_value": [0] * 60}, "sparse_disable_index_value has 0 for a sparse layer"),
        ({}, {"sparse_local_block": 17}, "index_local_blocks 17 is more than index_topk_blocks 16"),
    ],
)
def test_refused_configs(text: dict[str, Any], sparse: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path, text, sparse)


def test_draft_trees_are_refused(tmp_path: Path) -> None:
    args, config = EngineArgs.from_kwargs(), parse(tmp_path)
    check_sparse(args, [config], "cpu", 1)
    with pytest.raises(NotAvailableYet, match="--speculative-eagle-topk 2: not available yet: a draft tree's tokens"):
        check_sparse(args, [config], "cpu", 2)


def test_headers(tmp_path: Path) -> None:
    """MTP layers are not read without drafts; a missing tensor of the indexer is named."""
    path = make_checkpoint(BLOCK_SPARSE, tmp_path / "model", tokenizer=False)
    tensors, config = load_file(path / "model.safetensors"), load_model_config(path)
    names = ("enorm", "eh_proj", "transformer_layer.input_layernorm")
    for part in ("", "model."):
        mtp = {f"language_model.{part}mtp.layers.0.{name}.weight": torch.ones(64) for name in names}
        write_tensors(path, tensors | mtp)
        check_headers(path, read_checkpoint(path), config)
    name = "language_model.model.layers.2.self_attn.index_k_proj.weight"
    write_tensors(path, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=r"layers.2.self_attn.index_k_proj"):
        check_headers(path, read_checkpoint(path), config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_algorithm": "NEXTN"}, r"NEXTN: .* has no multi-token-prediction layers"),
        ({"enable_torch_compile": True}, "--enable-torch-compile: not available yet"),
    ],
)
def test_refused_flags(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    steps = {"speculative_num_steps": 1, "speculative_eagle_topk": 1} if "speculative_algorithm" in flags else {}
    with pytest.raises((ConfigError, NotAvailableYet), match=message):
        resolve(EngineArgs.from_kwargs(**flags, **steps), parse(tmp_path, {"num_mtp_modules": 0}), machine())
