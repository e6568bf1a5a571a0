"""MiMo-V2-Flash: two kinds of attention layers in one model, the published file, FP8 blocks, sizes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.open import layout_of
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.device import Device
from moe_engine.kernels.registry import select
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import GQAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.needs import need_of_model
from moe_engine.models.widths import local_heads
from moe_engine.parallel.topology import Topology
from moe_engine.planning.resolve import resolve
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.worker.kv_cache.kv_pool import kv_spec
from moe_engine.worker.kv_cache.make_copies import share_of
from tests.config.conftest import machine
from tests.models import stepper
from tests.models.checkpoints import dequantized_copy, make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.parameters import num_active_parameters
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_config import parse
from tests.models.test_parity import assert_close

KINDS = [0 if i == 0 or i % 6 == 5 else 1 for i in range(48)]
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096,
    "intermediate_size": 16384, "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "hybrid_layer_pattern": KINDS,
    "moe_layer_freq": [0] + [1] * 47, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128, "attention_value_scale": 0.707,
    "attention_bias": False, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000,
    "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": None,
    "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144, "vocab_size": 152576, "eos_token_id": 151645,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(48)],
    },
}  # fmt: skip
"""The names of the published file."""


def test_the_published_model(tmp_path: Path) -> None:
    config = parse(tmp_path, PUBLISHED)
    assert sizes.num_parameters(config) == pytest.approx(309e9, rel=5e-3)
    assert num_active_parameters(config) == pytest.approx(15e9, rel=5e-2)
    assert model_facts(PUBLISHED).num_parameters / 1e9 == pytest.approx(309, rel=1e-2)
    full, windowed = config.cache_groups
    assert full.layers == (0, 5, 11, 17, 23, 29, 35, 41, 47) and full.window is None and windowed.window == 129
    whole, own = config.attention_of(0), config.attention_of(1)
    assert isinstance(whole, GQAConfig) and isinstance(own, GQAConfig)
    assert (whole.num_kv_heads, own.num_kv_heads) == (4, 8) and (whole.sinks, own.sinks) == (False, True)
    assert whole.kv_parts("bfloat16") == ((4, 192), (4, 128)) and own.kv_parts("fp8_e4m3") == ((8, 196), (8, 132))
    assert config.kv_bytes_per_token("bfloat16") == 2 * (9 * 4 + 39 * 8) * 320
    assert [(rope.theta, rope.width) for rope in config.ropes] == [(5e6, 64), (1e4, 64)]
    assert config.norm_eps == 1e-5 and config.moe_layers == (False,) + (True,) * 47
    assert config.moe is not None and config.moe.scale == 1.0 and config.moe.has_bias and not config.moe.shared_width
    facts = model_facts(PUBLISHED)
    assert [(kind.layers, kind.kv_width, kind.keeps) for kind in facts.attention] == [(9, 1280, 0), (39, 2560, 129)]
    assert facts.dense_layers == 1
    of_rank = kv_spec(local_heads(config, 8), "bfloat16")
    assert of_rank.layers[0] == ((1, 192), (1, 128)) == of_rank.layers[1]
    weights = sizes.weight_bytes(config, 2, topology=Topology(8, ep_size=8), format=config.weight_format)
    assert weights == pytest.approx(309e9 / 8 + 152576 * 4096 * 2 * 2 / 8, rel=0.02)
    quantized = parse(
        tmp_path, PUBLISHED | {"quantization_config": PUBLISHED["quantization_config"] | {"ignored_layers": []}}
    )
    less = sizes.weight_bytes(config, 2, topology=Topology(8, ep_size=8), format=quantized.weight_format)
    assert weights - less == pytest.approx(48 * 4096 * 64 * 128 / 8, rel=1e-3), "o_proj is bfloat16"


def test_the_published_names_mean_what_transformers_reads(tmp_path: Path) -> None:
    """Fields that transformers does not read have the values of its defaults."""
    path = make_checkpoint("mimo_v2_flash", tmp_path, tokenizer=False, layer_types=None, rope_parameters=None)
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "mlp_layer_types")}
    config.pop("rope_parameters", None)
    own = {"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "swa_num_key_value_heads": 2}
    own |= {"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "sliding_window_size": 19}
    own |= {"routed_scaling_factor": None, "layernorm_epsilon": config.pop("rms_norm_eps"), "sliding_window": 19}
    (path / "config.json").write_text(json.dumps(config | own))
    tokens, want = reference_logits(path, 0)
    model = stepper.load(path, "torch")
    assert model.config.windows == (None, 20, 20)
    got = [model.step([Chunk(0, tokens[:70], False)])[0], model.step([Chunk(0, tokens[70:], True)])[0]]
    assert_close(torch.cat(got), want)


@pytest.mark.parametrize("row", all_rows())
def test_fp8_blocks_without_those_of_o_proj(tmp_path: Path, row: str) -> None:
    """As published: o_proj is not quantized, and MTP layers stand beside the model."""
    shape = {"hidden_size": 160, "intermediate_size": 264, "moe_intermediate_size": 136, "n_routed_experts": 4}
    shape |= {"head_dim": 72, "v_head_dim": 40}
    path = make_checkpoint("mimo_v2_flash", tmp_path / "fp8", tokenizer=False, fp8=True, **shape)
    tensors = load_file(path / "model.safetensors")
    plain = load_file(dequantized_copy(path, tmp_path / "plain") / "model.safetensors")
    for name in [name for name in tensors if name.endswith("o_proj.weight_scale_inv")]:
        del tensors[name]
        tensors[name.removesuffix("_scale_inv")] = plain[name.removesuffix("_scale_inv")]
    write_tensors(path, tensors | {"model.mtp.layers.0.eh_proj.weight": torch.ones(160, 320)})
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    tokens, want = reference_logits(tmp_path / "plain", 0)
    model = stepper.load(path, row)
    got = [model.step([Chunk(0, tokens[:70], False)])[0], model.step([Chunk(0, tokens[70:], True)])[0]]
    assert_close(torch.cat(got), want)


def test_headers_name_the_kind_that_differs(tmp_path: Path) -> None:
    path = make_checkpoint("mimo_v2_flash", tmp_path, tokenizer=False)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.0.self_attn.attention_sink_bias"
    assert "model.layers.1.self_attn.attention_sink_bias" not in tensors
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.attention_sink_bias \[4\] is missing"):
        check_headers(path, read_checkpoint(path), load_model_config(path))
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.k_proj.weight .*\[48, 64\], not \[96, 64\]"):
        check_headers(path, read_checkpoint(path), load_model_config(path, {"swa_num_key_value_heads": 4}))


def test_the_ledger_counts_what_is_held(tmp_path: Path) -> None:
    path = make_checkpoint("mimo_v2_flash", tmp_path, tokenizer=False)
    config, model = load_model_config(path), stepper.load(path).model
    assert model.weight_bytes == pytest.approx(sizes.weight_bytes(config, 4), rel=0.005)  # type: ignore[attr-defined]
    few = {"max_running_requests": 2, "chunked_prefill_size": 64}
    resolved = resolve(EngineArgs.from_kwargs(dtype="float32", max_total_tokens=4096, **few), config, machine())
    assert resolved.ledger.bytes_per_token == 4 * (24 + 16), "one layer without a window, one KV head"
    rows = resolved.num_window_slots + resolved.page_size
    assert resolved.ledger.bytes_of("KV of windows") == rows * 2 * 2 * 4 * (24 + 16) > 0


def test_windows_stay_apart_in_short_contexts(tmp_path: Path) -> None:
    """A context within the window has the layers' own numbers of KV heads, too."""
    config = load_model_config(make_checkpoint("mimo_v2_flash", tmp_path, tokenizer=False))
    short = config.within(16)
    assert short.windows == config.windows and len(short.cache_groups) == 2


def test_libraries_are_refused_by_name(tmp_path: Path) -> None:
    need = need_of_model(parse(tmp_path, PUBLISHED), "bfloat16")
    assert need.sinks and need.widths is not None and (need.widths.key, need.widths.value) == (192, 128)
    device = Device("cuda", "H100", (9, 0), compiler="c++")
    for row in ("flashinfer", "fa3"):
        with pytest.raises(ValueError, match=rf"{row}.*no attention sinks"):
            select("attention", tables.GQA, row, device, need)
    assert select("attention", tables.GQA, "auto", device, need).row.name == "triton"


def test_drafts_of_its_mtp_layers_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("mimo_v2_flash", tmp_path, tokenizer=False)
    asked = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    with pytest.raises(ConfigError, match=r"NEXTN: .*MTP layers of MiMoV2FlashForCausalLM.*use NGRAM"):
        resolve(EngineArgs.from_kwargs(**asked), load_model_config(path), machine())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swa_head_dim": 128}, ["swa_head_dim is 128, head_dim is 192"]),
        ({"swa_num_attention_heads": 32}, ["swa_num_attention_heads is 32"]),
        ({"swa_num_key_value_heads": 6}, ["swa_num_key_value_heads 6 does not divide", "64"]),
        ({"n_shared_experts": 1}, ["n_shared_experts", "shared experts"]),
        ({"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        ({"hybrid_layer_pattern": [2] * 48}, ["hybrid_layer_pattern", "0 and 1"]),
        ({"hybrid_layer_pattern": [1] * 4}, ["layer_types", "48"]),
        ({"v_head_dim": 126, "swa_v_head_dim": 126}, ["v_head_dim", "multiple of 4"]),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(tmp_path, PUBLISHED | change)
    assert all(word in str(error.value) for word in words), error.value


def test_shares_of_layers_with_different_heads(tmp_path: Path) -> None:
    """Copies between servers and pages in storage: what a rank has of each kind of layers."""
    config = parse(tmp_path, PUBLISHED)
    shares = []
    for ranks in (1, 2, 4, 8, 16):
        parallel: Any = SimpleNamespace(attn_tp_size=ranks, attn_tp_rank=ranks - 1)
        options: Any = SimpleNamespace(model=config, kv_dtype="bfloat16", draft_head=None)
        shares.append(share_of(options, parallel).count)
    assert shares == [1, 2, 4, 8, 16], "with 8 ranks two have the same part of 4 heads, but not of 8"
    for ranks in (1, 2, 4):
        resolved: Any = SimpleNamespace(parallel=SimpleNamespace(topology=Topology(ranks)), model=config)
        assert layout_of(resolved) == Layout(ranks, ranks, 8)
    args = EngineArgs.from_kwargs(disaggregation_mode="decode", tp_size=8, load_format="dummy")
    with pytest.raises(ConfigError, match=r"with 4 and with 8 KV heads .*use at most 4 ranks"):
        resolve(args, config, machine(1000, 1000))
