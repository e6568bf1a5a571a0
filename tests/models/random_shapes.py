"""Random shapes of every family against transformers: ``python -m tests.models.random_shapes --count 200``.

A checkpoint has drawn numbers of heads, layers, experts and groups, drawn widths, rotary settings, biases and ties, a
drawn dtype, dialect and number of files; fields that published files leave out are then dropped from config.json or
null, so that both sides use their defaults. Logits of a prompt in chunks and decodes are compared with those of
transformers' own model.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.examples import examples
from tests.models import stepper
from tests.models.checkpoints import KINDS, LLAMA3_ROPE, MORE_KINDS, YARN, join_experts, make_checkpoint
from tests.models.stepper import Chunk

LENGTH = 60
TOLERANCE = 2e-4
"""Of the norm of a token's logits."""
EXPERTS = {
    "axk1": "n_routed_experts",
    "deepseek_v2": "n_routed_experts", "deepseek_v2_lite": "n_routed_experts", "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts", "glm4_moe_lite": "n_routed_experts", "mistral4": "n_routed_experts",
    "dots1": "n_routed_experts", "solar_open": "n_routed_experts", "qwen3_moe": "num_experts", "hy_v3": "num_experts",
    "qwen2_moe": "num_experts", "olmoe": "num_experts", "gemma4": "num_experts", "flex_olmo": "num_experts",
    "cohere2_moe": "num_experts", "exaone_moe": "num_experts", "flint": "num_experts", "mellum": "num_experts",
    "qwen3_next": "num_experts", "qwen3_5_moe": "num_experts", "hunyuan_v1_moe": "num_experts",
    "mixtral": "num_local_experts", "minimax_m2": "num_local_experts", "gpt_oss": "num_local_experts",
    "ernie4_5_moe": "moe_num_experts", "mimo_v2_flash": "n_routed_experts", "kimi_linear": "num_experts",
    "bailing_hybrid": "num_experts", "step3p7": "moe_num_experts", "laguna": "num_experts", "afmoe": "num_experts",
    "llama4": "num_local_experts", "phimoe": "num_local_experts", "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts", "granitemoehybrid": "num_local_experts",
    "granitemoe_swa": "num_local_experts", "minimax": "num_local_experts", "lfm2_moe": "num_experts",
    "nemotron_h": "n_routed_experts", "longcat_flash": "n_routed_experts",
}  # fmt: skip
CHOSEN = {
    "ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk", "kimi_linear": "num_experts_per_token",
    "step3p7": "moe_top_k", "longcat_flash": "moe_topk", "gemma4": "top_k_experts",
}  # fmt: skip
GRANITE_MOE = ("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa")
WIDTHS = dict.fromkeys(
    ("hunyuan_v1_moe", "mixtral", "minimax_m2", "gpt_oss", "llama4", "phimoe", "minimax", "olmoe", "flex_olmo")
    + ("cohere2_moe",)
    + GRANITE_MOE,
    "intermediate_size",
)
WIDTHS |= {"longcat_flash": "expert_ffn_hidden_size"}
MLA = (
    "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear", "bailing_hybrid",
    "longcat_flash", "youtu", "axk1",
)  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
GROUPED = (
    "deepseek_v3",
    "deepseek_v2",
    "mistral4",
    "glm4_moe",
    "dots1",
    "glm4_moe_lite",
    "solar_open",
    "mimo_v2_flash",
    "bailing_hybrid",
    "nemotron_h",
    "exaone_moe",
    "axk1",
)
"""Routers that choose groups of experts."""
NOT_FUSED = ("mixtral", "minimax_m2", "gpt_oss", "kimi_linear", "step3p7", "laguna", "afmoe", "nemotron_h",
             "longcat_flash", "llama4", "phimoe", "minimax", "gemma4", "lfm2_moe", *GRANITE_MOE)  # fmt: skip
FUSED = [kind for kind in EXPERTS if kind not in NOT_FUSED]
"""Families whose experts are named alike in a matrix each and in common tensors."""
OF_LAYER_TYPES = ("laguna", "lfm2", "lfm2_moe")
"""Families whose layers differ in their tensors by `layer_types`."""
OF_THREE_LAYERS = ("glm4_moe_lite", "gpt_oss", "qwen2_moe", "qwen3_moe", "mimo_v2_flash")
NO_HEAD_DIM = ("olmoe", "qwen2", "qwen2_moe", "dots1", "ernie4_5_moe", "phi3", "lfm2", "lfm2_moe")
NO_HEAD_DIM += ("cohere2", "flex_olmo", "granite", "granite_swa", "olmo2", "olmo3", "smollm3", *GRANITE_MOE)
"""Families whose heads divide the hidden size."""
OWN_ROPE = (
    "kimi_linear", "gpt_oss", "mimo_v2_flash", "ministral3", "mistral4", "hunyuan_v1_moe", "hunyuan_v1_dense",
    "step3p7", "laguna", "afmoe", "nemotron_h", "phi3", "phimoe", "llama4", "gemma3", "gemma4", "olmo3", "mellum",
    "cohere2_moe",
)  # fmt: skip
NO_BIAS = ("mistral", "mixtral", "qwen2", "minimax_m2", "gpt_oss", "ernie4_5", "ernie4_5_moe", "ministral3", *HYBRID)
NO_BIAS += ("exaone4", "exaone_moe", "ministral", "glm", "glm4", "olmoe", "qwen2_moe", "nemotron_h", "phi3", "minimax")
NO_BIAS += ("lfm2", "lfm2_moe")
PARTIAL = ("glm", "glm4", "glm4_moe")
"""Families that rotate a part of each head."""
FACTORS = ("full_attn", "linear_attn", "mlp")
"""Of residuals of MiniMax-Text-01."""
NO_TIE = ("qwen3_next", "kimi_linear", "bailing_hybrid", "step3p7", "nemotron_h")
DROPPED = (
    "rms_norm_eps", "rope_theta", "hidden_act", "attention_bias", "mlp_bias", "norm_topk_prob", "routed_scaling_factor",
    "topk_method", "scoring_func", "rope_scaling", "rope_interleave", "moe_layer_freq",
    "use_sliding_window", "max_window_layers", "sliding_window", "decoder_sparse_step", "mlp_only_layers",
    "partial_rotary_factor", "rotary_dim", "pad_token_id", "use_cache", "layer_types", "mlp_layer_types",
    "router_scaling_factor", "use_qk_norm", "tie_word_embeddings", "swiglu_limit", "moe_layer_end_index", "use_bias",
    "max_position_embeddings", "n_shared_experts", "first_k_dense_replace",
    "moe_layer_interval", "moe_layer_start_index", "moe_num_shared_experts", "attention_dropout", "torch_dtype",
    "full_attention_interval", "zero_expert_type", "mla_scale_q_lora",
)  # fmt: skip

NULLED = ("rope_scaling", "layer_types", "norm_topk_prob", "rope_interleave", "partial_rotary_factor", "sliding_window")
DTYPES = ("float32", "float32", "float16", "bfloat16")
NO_ODD_HIDDEN = ("llama", "gemma2", "gemma3", *MLA)
"""Families whose hidden size transformers wants to be a multiple of the heads."""


@dataclass
class Shape:
    """A drawn checkpoint: overrides of `make_checkpoint`; fields that are dropped or null afterwards, and fields that
    are added; further arguments of `make_checkpoint`; whether several files have an index, and a layer's experts are in
    common tensors."""

    kind: str
    row: str
    fields: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    nulled: list[str] = field(default_factory=list)
    added: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    has_index: bool = True
    fused: bool = False


def draw(kind: str, rng: random.Random) -> Shape:
    layers = rng.choice((1, 2, 3, 4)) if kind not in OF_THREE_LAYERS else 3
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": rng.choice((257, 263, 300, 331)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }
    if kind not in NO_TIE:
        fields["tie_word_embeddings"] = rng.random() < 0.3
    if kind not in WIDTHS:
        fields["intermediate_size"] = rng.choice((20, 37, 66, 96))
    (_draw_mla if kind in MLA else _draw_heads)(kind, rng, fields)
    if kind in EXPERTS:
        _draw_experts(kind, rng, fields)
    if kind == "mistral4":
        part = fields["qk_rope_head_dim"] / (fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"])
        scaling = {"llama_4_scaling_beta": rng.choice((0.1, 0.5)), "original_max_position_embeddings": 16}
        fields["rope_scaling"] = {**YARN, **scaling, "partial_rotary_factor": part}
    if kind == "step3p7":
        _draw_step(rng, fields)
    if kind == "laguna":
        _draw_laguna(rng, fields)
    if kind == "phi3":
        _draw_phi3(rng, fields)
    if kind == "phimoe":
        _draw_phimoe(rng, fields)
    if kind in ("olmo3", "exaone4", "smollm3", "granite", "granite_swa", "exaone_moe", "flint", "mellum", *GRANITE_MOE):
        _draw_dense(kind, rng, fields)
    if kind.startswith("cohere2"):
        _draw_cohere(kind, rng, fields)
    if kind == "minimax":
        known = ("full_attention", "linear_attention")
        fields["layer_types"] = [known[0], *(rng.choice(known) for _ in range(layers - 1))]
        fields |= {f"{part}_{name}_factor": rng.choice((0.6, 1, 3.5)) for part in FACTORS for name in ("alpha", "beta")}
        fields["block_size"] = rng.choice((8, 32))
    if kind == "llama4":
        _draw_llama4(rng, fields)
    if kind in ("lfm2", "lfm2_moe"):
        _draw_lfm2(kind, rng, fields)
    if kind in ("gemma2", "gemma3", "gemma4"):
        _draw_gemma(kind, rng, fields)
    if kind == "afmoe":
        fields |= {
            "num_dense_layers": rng.choice((0, 1, layers)), "num_shared_experts": rng.choice((1, 2)),
            "global_attn_every_n_layers": rng.choice((1, 2, 4)), "sliding_window": rng.choice((7, 20)),
            "route_scale": rng.choice((1.0, 2.8)), "mup_enabled": rng.random() < 0.5,
        }  # fmt: skip
    if kind in HYBRID:
        fields["head_dim"] = rng.choice((8, 16, 24, 40))
        keys = rng.choice((1, 2, 3))
        fields |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice((1, 2, 3))}
        fields |= {
            "full_attention_interval": rng.randint(1, min(3, layers)),
            "linear_conv_kernel_dim": rng.choice((2, 3, 4)),
        }
    if kind == "kimi_linear":
        full = sorted(rng.sample(range(1, layers + 1), rng.randint(1, layers)))
        fields["linear_attn_config"] = {
            "full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "head_dim": rng.choice((8, 12, 20, 40)), "num_heads": rng.choice((1, 2, 3)),
            "short_conv_kernel_size": rng.choice((2, 3, 4)),
        }  # fmt: skip
    if kind == "nemotron_h":
        _draw_mixers(rng, fields)
    if kind == "bailing_hybrid":
        fields |= {
            "layer_group_size": rng.choice([size for size in range(1, layers + 1) if layers % size == 0]),
            "head_dim": rng.choice((8, 12, 20, 40)), "short_conv_kernel_size": rng.choice((2, 3, 4)),
            "kda_safe_gate": rng.random() < 0.7, "kda_lower_bound": rng.choice((-5.0, -2.5)), "q_lora_rank": None,
        }  # fmt: skip
    if kind == "axk1":
        fields |= {"q_lora_rank": rng.choice((8, 10, 24))}
        fields |= {"mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(layers)]}
    if kind == "longcat_flash":
        fields |= {
            "num_hidden_layers": layers + layers % 2, "ffn_hidden_size": rng.choice((20, 37, 66, 96)),
            "zero_expert_num": rng.choice((1, 2, 5)), "routed_scaling_factor": rng.choice((1.0, 2.5)),
            "q_lora_rank": rng.choice((8, 10, 24)), "attention_bias": False, "head_dim": fields["qk_rope_head_dim"],
        }  # fmt: skip
    if kind not in OWN_ROPE and kind not in HYBRID:
        fields["rope_scaling"] = _rope(rng, kind)
        fields["rope_theta"] = rng.choice((1e4, 1e6, 500000.0))
    if kind in ("mistral", "mixtral", "dots1", "ministral", "ministral3", "phi3"):
        fields["sliding_window"] = rng.choice((None, 7, 20))
    if kind in ("qwen2", "qwen3") and rng.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": rng.randint(0, layers)}
    shaping = [name for name in ("attention_bias", "mlp_bias", "mlp_layer_types") if fields.get(name, name[-1] == "s")]
    tied = ("cohere", "ernie", "gemma", "granite_swa", "lfm2", "smollm3", "youtu")
    if fields.get("tie_word_embeddings", False) != kind.startswith(tied):
        shaping.append("tie_word_embeddings")
    if kind == "flint":
        shaping.append("mlp_only_layers")
    if kind in OF_LAYER_TYPES:
        shaping.append("layer_types")
    dropped = [name for name in DROPPED if rng.random() < 0.1 and name not in shaping]
    nulled = [name for name in NULLED if rng.random() < 0.05 and (kind not in OF_LAYER_TYPES or name not in shaping)]
    if kind not in NO_HEAD_DIM and kind not in NO_ODD_HIDDEN and rng.random() < 0.4:
        fields["hidden_size"] = rng.choice((34, 50, 66, 100, 130))
    stored: dict[str, Any] = {"dtype": rng.choice(DTYPES), "dialect": rng.choice(("hub", "hub", "transformers"))}
    stored |= {"max_shard_bytes": rng.choice((None, None, 3000, 60000)), "eos_token_id": rng.choice((1, [1, 7]))}
    added = {} if "rope_scaling" not in fields or kind in OWN_ROPE else _second_rope(rng, kind, stored["dialect"])
    if fields.get("head_dim", 0) % 4:
        added.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    shape = Shape(kind, rng.choice(("torch", "cpu")), fields, dropped, nulled, added, stored, rng.random() < 0.5)
    shape.fused = kind in FUSED and rng.random() < 0.2
    return shape


def _draw_heads(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    kv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 5))
    width = rng.choice((6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112))
    hidden = kv * group * rng.choice((4, 8, 20)) if kind not in NO_HEAD_DIM else kv * group * width
    fields |= {"num_attention_heads": kv * group, "num_key_value_heads": kv, "hidden_size": hidden}
    if kind not in NO_HEAD_DIM:
        fields["head_dim"] = width
    if kind == "mimo_v2_flash":
        fields |= {"num_attention_heads": 4, "num_key_value_heads": rng.choice((1, 2)), "sliding_window": 9}
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        fields |= {"v_head_dim": rng.choice((8, 16, 28)), "attention_value_scale": rng.choice((None, 0.707))}
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 5e5}}
    if kind == "minimax_m2":
        fields["rotary_dim"] = rng.choice((4, width // 2 // 2 * 2, width))
    if kind in PARTIAL:
        fields["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
        if int(width * fields["partial_rotary_factor"]) % 2:
            fields["partial_rotary_factor"] = 0.5 if width % 4 == 0 else 1.0
    if kind == "glm4_moe":
        fields["use_qk_norm"] = rng.random() < 0.5
    if kind not in NO_BIAS:
        fields["attention_bias"] = rng.random() < 0.5
    if kind in ("llama", "smollm3", "granite"):
        fields["mlp_bias"] = rng.random() < 0.5


def _draw_step(rng: random.Random, fields: dict[str, Any]) -> None:
    """Lists by layer, with those of an MTP layer or without, and windows in some, all or no layers."""
    layers, groups = fields["num_hidden_layers"], fields.pop("num_key_value_heads")
    known = ("full_attention", "sliding_attention")
    kinds = [rng.choice(known) for _ in range(layers)]
    part = {kind: rng.choice((0.5, 1.0)) if fields["head_dim"] % 4 == 0 else 1.0 for kind in known}
    theta = {"full_attention": 5e6, "sliding_attention": 1e4}
    mixtures = [i for i in range(layers) if rng.random() < 0.7]
    limits = [[rng.choice((0.0, 0.3)) if i in mixtures else 0.0 for i in range(layers)] for _ in range(2)]
    fields |= {
        "layer_types": kinds, "rope_theta": [theta[kind] for kind in kinds], "num_attention_groups": groups,
        "partial_rotary_factors": [part[kind] for kind in kinds], "moe_layers_enum": ",".join(map(str, mixtures)),
        "swiglu_limits": limits[0], "swiglu_limits_shared": rng.choice((limits[1], None)),
        "sliding_window": rng.choice((7, 20)), "share_expert_dim": rng.choice((20, 37, 48)),
        "rope_scaling": rng.choice((None, LLAMA3_ROPE)), "moe_router_scaling_factor": rng.choice((1.0, 3.0)),
        "attention_other_setting": {
            "num_attention_heads": groups * rng.choice((1, 2, 3)), "num_attention_groups": groups,
        },
    }  # fmt: skip


def _draw_mixers(rng: random.Random, fields: dict[str, Any]) -> None:
    """Layers of Nemotron-H, of which one is attention at least."""
    kinds = ""
    while len(kinds) < fields["num_hidden_layers"]:
        kinds += rng.choice("MM*" if not kinds or kinds[-1] in "E-" else "M*EE-")
    if "*" not in kinds:
        kinds = "*" + kinds[1:]
    groups = rng.choice((1, 2, 3))
    fields |= {
        "hybrid_override_pattern": kinds, "n_groups": groups, "mamba_num_heads": groups * rng.choice((1, 2, 3)),
        "mamba_head_dim": rng.choice((4, 12, 20, 64)), "ssm_state_size": rng.choice((4, 16, 20, 40)),
        "conv_kernel": rng.choice((2, 3, 4)), "chunk_size": rng.choice((8, 32)),
        "layer_norm_epsilon": fields.pop("rms_norm_eps"), "use_conv_bias": rng.random() < 0.7,
    }  # fmt: skip


def _draw_laguna(rng: random.Random, fields: dict[str, Any]) -> None:
    """Windows in some, all or no layers, which may have other numbers of heads; gates of a head or a channel."""
    layers, groups = fields["num_hidden_layers"], fields["num_key_value_heads"]
    known = ("full_attention", "sliding_attention")
    kinds = [rng.choice(known) for _ in range(layers)]
    heads = {kind: groups * rng.choice((1, 2, 3)) for kind in known}
    part = rng.choice((0.5, 1.0)) if fields["head_dim"] % 4 == 0 else 1.0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.1}
    fields |= {
        "layer_types": kinds, "num_attention_heads_per_layer": [heads[kind] for kind in kinds],
        "sliding_window": rng.choice((7, 20)), "shared_expert_intermediate_size": rng.choice((20, 37, 48)),
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in kinds],
        "moe_routed_scaling_factor": rng.choice((1.0, 2.5)), "gating": rng.choice((True, "per-head", "per-element")),
        "rope_parameters": {
            known[0]: rng.choice(({"rope_type": "default"}, yarn)) | {"rope_theta": 5e5, "partial_rotary_factor": part},
            known[1]: {"rope_theta": 1e4, "rope_type": "default"},
        },
    }  # fmt: skip


def _draw_lfm2(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    """Convolutions in some or no layers, widths of dense layers by several fields."""
    kinds = [rng.choice(("conv", "full_attention")) for _ in range(fields["num_hidden_layers"])]
    kinds[rng.randrange(len(kinds))] = "full_attention"
    fields |= {
        "layer_types": kinds, "conv_L_cache": rng.choice((2, 3, 4)), "rms_norm_eps": None,
        "norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }  # fmt: skip
    if kind == "lfm2":
        fields |= {
            "block_auto_adjust_ff_dim": rng.random() < 0.7, "block_multiple_of": rng.choice((1, 8, 24)),
            "block_ffn_dim_multiplier": rng.choice((1.0, 1.3)),
        }  # fmt: skip
    else:
        fields |= {
            "num_dense_layers": rng.choice((0, 1, len(kinds))), "use_expert_bias": rng.random() < 0.7,
            "norm_topk_prob": rng.random() < 0.7, "routed_scaling_factor": rng.choice((1.0, 2.5)),
        }  # fmt: skip


def _draw_phi3(rng: random.Random, fields: dict[str, Any]) -> None:
    """Part of a head is rotated, by factors for long or for short contexts."""
    width = fields["hidden_size"] // fields["num_attention_heads"]
    part = rng.choice([part for part in (0.5, 0.75, 1.0) if int(width * part) % 2 == 0])
    lists = {f"{name}_factor": [rng.uniform(1, 8) for _ in range(int(width * part) // 2)] for name in ("long", "short")}
    fields |= {"partial_rotary_factor": part, "rope_scaling": rng.choice((None, {"type": "longrope", **lists}))}
    fields |= {"rope_theta": rng.choice((1e4, 5e5)), "original_max_position_embeddings": rng.choice((32, 512))}


def _draw_dense(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    """Layers with windows or without positions in any order; Granite's factors."""
    layers = fields["num_hidden_layers"]
    if kind.startswith("granite"):
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        fields |= {name: rng.choice((0.22, 1.0, 6.5)) for name in names}
        width = fields["hidden_size"] // fields["num_attention_heads"]
        fields["attention_multiplier"] = rng.choice((0.3, 0.7, 1.1)) * width**-0.5  # scores magnify rounding
        fields |= {"shared_intermediate_size": rng.choice((0, 12, 33))} if kind == "granitemoeshared" else {}
        if kind.endswith("_swa"):
            kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            bases = rng.choice(((0, 1e4), (1e4, 5e5)))
            fields |= {
                "sliding_window": rng.choice((7, 20)), "layer_types": rng.choice((None, kinds)),
                "layer_rope_theta": rng.choice((None, [rng.choice(bases) for _ in range(layers)])),
            }  # fmt: skip
            fields |= {"shared_intermediate_size": rng.choice((0, 12))} if kind in GRANITE_MOE else {}
        if kind == "granitemoehybrid":
            kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers)]
            heads = rng.choice([heads for heads in (1, 2, 4, 8) if 2 * fields["hidden_size"] % heads == 0])
            fields |= {
                "layer_types": ["full_attention", *kinds[1:]], "shared_intermediate_size": rng.choice((12, 33)),
                "mamba_n_heads": heads, "mamba_d_state": rng.choice((4, 16, 20, 40)), "mamba_conv_bias": True,
                "mamba_d_conv": rng.choice((2, 3, 4)), "position_embedding_type": rng.choice((None, "nope", "rope")),
                "num_local_experts": rng.choice((0, fields["num_local_experts"])),
            }  # fmt: skip
    elif kind == "smollm3":
        fields |= {"no_rope_layers": rng.choice((None, [rng.choice((0, 1)) for _ in range(layers)]))}
        fields |= {"no_rope_layer_interval": rng.choice((1, 2, 3)), "use_sliding_window": rng.random() < 0.5}
        fields |= {"sliding_window": rng.choice((None, 7, 20))}
    else:
        kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
        fields |= {"sliding_window": rng.choice((7, 20)), "layer_types": rng.choice((None, kinds))}
    if kind == "mellum":
        fields["mlp_layer_types"] = [rng.choice(("dense", "sparse")) for _ in range(layers)]
    if kind == "flint":
        fields["mlp_only_layers"] = [i for i in range(layers) if rng.random() < 0.4]
    if kind in ("exaone4", "exaone_moe"):
        fields |= {"sliding_window_pattern": rng.choice((1, 2, 3, 4))}
        if rng.random() < 0.3:
            fields |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    if kind in ("olmo3", "mellum"):
        scaled = rng.choice(({"rope_type": "default"}, YARN | {"attention_factor": 1.3}))
        ropes = {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}
        fields["rope_parameters"] = {name: {"rope_theta": 5e5, **rope} for name, rope in ropes.items()}


def _draw_cohere(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    """Windows and experts in some, all or no layers, dense layers first or anywhere; both norms of mixtures."""
    layers, known = fields["num_hidden_layers"], ("full_attention", "sliding_attention")
    kinds = [rng.choice(known) for _ in range(layers)]
    fields |= {
        "sliding_window": rng.choice((7, 20)), "layer_types": rng.choice((None, kinds)), "logit_scale": 0.5,
        "sliding_window_pattern": rng.choice((1, 2, 4)), "layer_norm_eps": rng.choice((1e-5, 1e-3)),
    }  # fmt: skip
    if kind == "cohere2":
        return
    fields |= {
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(layers)],
        "prefix_dense_intermediate_size": rng.choice((None, 20, 37)), "num_shared_experts": rng.choice((0, 1, 2)),
        "prefix_dense_sliding_window_pattern": rng.choice((1, 2)), "rms_norm_eps": rng.choice((None, None, 1e-3)),
        "expert_selection_fn": rng.choice(("softmax", "sigmoid")), "norm_topk_prob": rng.random() < 0.5,
        "shared_expert_combination_strategy": rng.choice(("average", "sum")), "rope_theta": rng.choice((1e4, 5e4)),
    }  # fmt: skip


def _draw_phimoe(rng: random.Random, fields: dict[str, Any]) -> None:
    """transformers reads the short list for texts of any length, and a factor of attention for each length."""
    factors, original = [rng.uniform(1, 8) for _ in range(fields["head_dim"] // 2)], rng.choice((32, 512))
    scaling = {"type": "longrope", "long_factor": factors, "short_factor": factors, "short_mscale": rng.uniform(0.8, 2)}
    scaling |= {"long_mscale": rng.uniform(0.8, 2), "original_max_position_embeddings": original}
    fields |= {
        "num_local_experts": rng.choice((2, 5, 16)), "num_experts_per_tok": 2, "lm_head_bias": rng.random() < 0.7,
        "router_jitter_noise": rng.choice((0.01, 0.1, 0.5)), "sliding_window": rng.choice((None, 20)),
        "rope_scaling": rng.choice((None, scaling)), "original_max_position_embeddings": original,
    }  # fmt: skip


def _draw_gemma(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    """Windows in some, all or no layers, with rotary settings of their own; another scale of scores than the heads'.
    Gemma 4: other heads in layers without a window; the last layer has none."""
    layers, known = fields["num_hidden_layers"], ("full_attention", "sliding_attention")
    fields |= {"sliding_window": rng.choice((7, 20)), "final_logit_softcapping": rng.choice((None, 3.0))}
    if kind == "gemma4":
        kinds, kv = [*(rng.choice(known) for _ in range(layers - 1)), known[0]], fields["num_key_value_heads"]
        rope = {"rope_type": "proportional", "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)), "rope_theta": 1e5}
        fields |= {
            "layer_types": rng.choice((None, kinds)), "global_head_dim": rng.choice((8, 24, 64, 80)),
            "num_global_key_value_heads": rng.choice((None, 1, kv)), "attention_k_eq_v": rng.random() < 0.6,
            "enable_moe_block": rng.random() < 0.6,
            "rope_parameters": {
                known[0]: rng.choice((rope, {"rope_type": "default", "rope_theta": 1e4})),
                known[1]: {"rope_type": "default", "rope_theta": rng.choice((500.0, 1e4))},
            },
        }  # fmt: skip
        return
    if kind == "gemma2":
        fields |= {
            "attn_logit_softcapping": rng.choice((None, 0.5, 2.0)), "query_pre_attn_scalar": rng.choice((1, 5, 30)),
            "layer_types": rng.choice((None, [rng.choice(known) for _ in range(layers)])),
        }  # fmt: skip
        return
    fields |= {
        "query_pre_attn_scalar": rng.choice((fields["head_dim"], 5, 30)),
        "rope_theta": rng.choice((1e4, 1e6)), "rope_local_base_freq": rng.choice((1e4, 500.0)),
        "rope_scaling": rng.choice((None, {"rope_type": "linear", "factor": rng.choice((2.0, 8.0))})),
        "layer_types": rng.choice((None, [rng.choice(known) for _ in range(layers)])),
        "sliding_window_pattern": rng.choice((1, 2, 3)),
    }  # fmt: skip


def _draw_llama4(rng: random.Random, fields: dict[str, Any]) -> None:
    """Positions in some, all or no layers, with chunks or without; one expert a token."""
    layers = fields["num_hidden_layers"]
    fields |= {
        "num_experts_per_tok": 1, "intermediate_size_mlp": rng.choice((20, 37, 96)), "use_qk_norm": rng.random() < 0.6,
        "no_rope_layers": [rng.choice((0, 1)) for _ in range(layers)] if rng.random() < 0.5 else [],
        "no_rope_layer_interval": rng.choice((1, 2, 4)), "interleave_moe_layer_step": rng.choice((1, 2)),
        "attention_chunk_size": rng.choice((7, 16, 25, 100)), "attn_temperature_tuning": rng.random() < 0.7,
        "floor_scale": rng.choice((5, 16, 8192)), "attn_scale": rng.choice((0.1, 0.5)),
    }  # fmt: skip
    if rng.random() < 0.5:
        yarn, sharp = YARN | {"attention_factor": 1.3}, LLAMA3_ROPE | {"high_freq_factor": 1.0}
        fields["rope_scaling"] = rng.choice((None, yarn, LLAMA3_ROPE, sharp))


def _draw_mla(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    heads = rng.choice((1, 2, 3, 5))
    fields |= {
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * rng.choice((12, 20, 64)),
        "q_lora_rank": rng.choice((None, 8, 10, 24)), "kv_lora_rank": rng.choice((8, 32, 36, 50)),
        "qk_nope_head_dim": rng.choice((4, 5, 16, 24, 48)), "qk_rope_head_dim": rng.choice((2, 4, 6, 8, 16)),
        "v_head_dim": rng.choice((5, 8, 12, 28, 48)), "attention_bias": rng.random() < 0.3,
    }  # fmt: skip
    if kind == "deepseek_v3":
        fields["rope_interleave"] = rng.random() < 0.7


def _draw_experts(kind: str, rng: random.Random, fields: dict[str, Any]) -> None:
    groups = rng.choice((1, 1, 2, 4)) if kind in GROUPED else 1
    count = groups * rng.choice((2, 3, 4, 5))
    kept = rng.randint(1, groups)
    chosen = rng.randint(1, count // groups * kept)
    fields |= {EXPERTS[kind]: count, CHOSEN.get(kind, "num_experts_per_tok"): chosen}
    fields[WIDTHS.get(kind, "moe_intermediate_size")] = rng.choice((12, 20, 32, 38))
    if kind in GROUPED:
        fields |= {"n_group": groups, "topk_group": kept}
        fields |= {"routed_scaling_factor": rng.choice((1.0, 2.5))}
        fields["norm_topk_prob"] = rng.random() < 0.7 and kind != "deepseek_v2"  # which transformers does not follow
        shared = "num_shared_experts" if kind in ("bailing_hybrid", "exaone_moe") else "n_shared_experts"
        fields[shared] = rng.choice((1, 2)) if kind not in ("mimo_v2_flash", "nemotron_h") else None
        if kind == "nemotron_h":
            fields |= {shared: 1, "moe_shared_expert_intermediate_size": rng.choice((12, 33, 64))}
            fields["moe_latent_size"] = rng.choice((None, 8, 22))
    if kind in ("flint", "qwen2_moe"):
        fields["shared_expert_intermediate_size"] = rng.choice((12, 33, 64))
    if kind in ("flex_olmo", "flint", "mellum", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"):
        fields["norm_topk_prob"] = rng.random() < 0.5
    if kind == "deepseek_v2":
        fields["topk_method"] = rng.choice(("greedy", "group_limited_greedy"))
    layers = fields["num_hidden_layers"]
    if kind in ("deepseek_v3", "deepseek_v2", "deepseek_v2_lite", "mistral4", "glm4_moe", "dots1"):
        fields["first_k_dense_replace"] = rng.choice((0, 1, layers))
    if kind == "ernie4_5_moe":
        fields |= {"moe_layer_start_index": rng.choice((0, 1)), "moe_num_shared_experts": rng.choice((0, 1, 2))}
    if kind == "hy_v3":
        fields["num_shared_experts"] = rng.choice((1, 2))


def _second_rope(rng: random.Random, kind: str, dialect: str) -> dict[str, Any]:
    """Rotary settings of the other dialect, or the length before scaling beside them."""
    other = _rope(rng, kind)
    part = {"partial_rotary_factor": 0.5} if kind in PARTIAL and rng.random() < 0.5 else {}
    if dialect == "hub" and other is not None:
        other = other | rng.choice(({}, {"rope_theta": 5e4})) | part
    both = {"rope_parameters" if dialect == "hub" else "rope_scaling": other or {}}
    return rng.choice(({}, {}, {}, both, {"original_max_position_embeddings": rng.choice((16, 48))}))


def _rope(rng: random.Random, kind: str) -> dict[str, Any] | None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 32
    more = rng.choice(({}, {"beta_fast": 16, "beta_slow": 2}, {"attention_factor": 0.8}, {"truncate": False}))
    other = ({"rope_type": "linear", "factor": 3.0}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "default"}, {})
    found = rng.choice((None, None, rng.choice(other), yarn | more, llama3))
    if found and kind.startswith("deepseek"):
        found |= rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0}, {"mscale": 0.7}))
    return found


class Refused(Exception):
    """transformers does not make or load the drawn checkpoint."""


def check(shape: Shape, folder: Path, seed: int) -> float:
    """The largest relative error of a token's logits. Raises Refused."""
    try:
        path = make_checkpoint(shape.kind, folder, seed, tokenizer=False, **shape.fields, **shape.stored)
        if shape.fused:
            join_experts(path)
        file = path / "config.json"
        config = json.loads(file.read_text())
        config |= {name: None for name in shape.nulled if name in config}
        kept = {name: value for name, value in config.items() if name not in shape.dropped}
        file.write_text(json.dumps(kept | shape.added))
        tokens, want = reference(path, seed, shape.fields["vocab_size"])
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    if not shape.has_index:
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
    return difference(logits(path, shape.row, seed, tokens), want)


def difference(got: Tensor, want: Tensor) -> float:
    """The largest error of a token's logits, relative to their norm."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def logits(path: Path, row: str, seed: int, tokens: list[int]) -> Tensor:
    """[T, V] of a prompt in chunks and decodes."""
    model = stepper.load(path, row, seed=seed)
    parts = [(tokens[:23], False), (tokens[23:40], False), *(([token], True) for token in tokens[40:50])]
    return torch.cat([model.step([Chunk(0, part, decode)])[0] for part, decode in [*parts, (tokens[50:], True)]])


def reference(path: Path, seed: int, vocab: int) -> tuple[list[int], Tensor]:
    """Tokens of a prompt, and their logits by transformers [T, V]. Raises ValueError: tensors are missing or left."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    ids = torch.randint(0, min(vocab, 256), (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"] or info["unexpected_keys"]:
        raise ValueError(f"loads in part: {info}")
    with torch.no_grad():
        return ids[0].tolist(), model.eval()(ids).logits[0]


def run_draws(
    description: str | None,
    kinds: Sequence[str],
    count: int,
    draw: Callable[[str, random.Random], Any],
    check: Callable[[Any, Path, random.Random, int], str],
) -> None:
    """A command that checks random shapes and prints those that differ, with their seeds.

    Args:
        check: (shape, folder, random numbers, seed) -> what it compared, or ""; raises a difference.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kinds", nargs="*", default=kinds)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    asked = parser.parse_args()
    failed = refused = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        rng = random.Random(seed)
        shape = draw(rng.choice(asked.kinds), rng)
        with tempfile.TemporaryDirectory() as folder:
            try:
                if compared := check(shape, Path(folder), rng, seed):
                    print(compared, flush=True)
            except Refused as error:
                refused += 1
                print(f"refused by transformers: {shape.kind}: {str(error)[:150]}", flush=True)
            except Exception as error:
                failed += 1
                print(f"--seed {seed}: {type(error).__name__}: {error}\n    {shape}", flush=True)
    print(f"{asked.count} shapes, {refused} refused by transformers, {failed} differ")
    raise SystemExit(failed > 0)


def check_draws(
    folder: Path,
    attempts: int,
    draw: Callable[[random.Random], Any],
    check: Callable[[Any, Path, random.Random], object],
) -> None:
    """A test that checks a random draw, several with `MOE_TEST_EXAMPLES`. A refused one is drawn again.

    Args:
        folder: of the test; each draw has a folder in it.
        draw: None: draw again.
    """
    for number in range(examples(1)):
        for attempt in range(attempts):
            rng = random.Random(random.getrandbits(32))
            drawn = draw(rng)
            if drawn is None:
                continue
            (own := folder / f"{number}-{attempt}").mkdir()
            try:
                check(drawn, own, rng)
                break
            except Refused:
                continue
            except AssertionError as error:
                raise AssertionError(f"{error}: {drawn}") from error
        else:
            raise AssertionError(f"{attempts} draws were refused")


def within_tolerance(check: Callable[[Any, Path, int], float]) -> Callable[[Any, Path, random.Random, int], str]:
    """A check of `run_draws` by one that returns the difference."""

    def compared(shape: Any, folder: Path, rng: random.Random, seed: int) -> str:
        found = check(shape, folder, seed)
        assert found < TOLERANCE, found
        return ""

    return compared


if __name__ == "__main__":
    run_draws(__doc__, [*KINDS, *MORE_KINDS], 100, draw, within_tolerance(check))
