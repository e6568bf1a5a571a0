"""Tiny random checkpoints of every family, generated from a seed, with a byte-level tokenizer for servers.

Tensors come from transformers' models, so that names and shapes have another source. Norm weights are not 1 and
the router bias is not 0: defaults would hide a forgotten norm or bias.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.fp8 import dequantize_fp8, quantize_fp8
from tests.models.nemotron_mtp import add_nemotron_mtp
from tests.models.step_mtp import add_step_mtp, with_mtp_fields

LONGCAT = "longcat_flash"
"""The kind with experts on a shortcut, whose config.json has `num_layers` of two attentions each."""
KINDS = (
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v2_lite",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "minimax",
    "minimax_m2",
    "mimo_v2_flash",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_linear",
    "bailing_hybrid",
    "step3p7",
    "nemotron_h",
    LONGCAT,
)
MORE_KINDS = (
    "axk1",
    "cohere2",
    "cohere2_moe",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "granite",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "granite_swa",
    "glm",
    "glm4",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "afmoe",
    "gemma2",
    "gemma3",
    "gemma4",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "llama4",
    "mellum",
    "ministral",
    "ministral3",
    "mistral4",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "youtu",
)
"""Families that differ little from those of `KINDS`."""
BLOCK_SPARSE = "minimax_m3"
"""The kind with block-sparse attention, whose config.json has the text model in `text_config`."""
POOLED = "glm5_next"
"""The kind with pools of index keys, whose config.json has the text model in `text_config`."""
GATED_STREAMS = "qwen4_exp"
"""The kind with gated streams and tables of n-grams beside pools, whose config.json has the text model in
`text_config`."""
MIXERS = "ME*M-M*E"
"""The layers of Nemotron-H: each kind, and mixers with and without a feed-forward after them."""
LARGE4 = "mistral_large4"
"""The kind with products of the input instead of a query's latent, whose config.json has the text model in
`text_config`."""
SPARSE_KINDS = ("deepseek_v32", "glm_moe_dsa", LARGE4)
"""Kinds with sparse attention: contexts exceed `index_topk`."""

YARN = {
    "type": "yarn",
    "factor": 8,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_FACTORS = [1.0, 1.3, 2.0, 3.1, 4.6, 6.0, 7.7, 9.0]
PHI_ROPE = {
    "type": "longrope", "long_factor": _FACTORS, "short_factor": _FACTORS, "short_mscale": 1.1, "long_mscale": 1.3,
    "original_max_position_embeddings": 32,
}  # fmt: skip
"""Of Phi-3.5-MoE. transformers reads the short list for texts of any length."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-6,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
}
_GQA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rope_theta": 10000.0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
_LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "norm_eps": 1e-5, "rms_norm_eps": None,
    "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 8.0,
}
_SWA: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 20,
    "layer_rope_theta": [0, 10000.0, 10000.0],
}  # fmt: skip
_GRANITE_MOE = {**_GQA, **_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
_DEEPSEEK_MOE: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_DSA: dict[str, Any] = {
    **_MLA,
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 8,
}
DELTA: dict[str, Any] = {
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_MLA,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_MLA,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "routed_scaling_factor": 4.0,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {
            **_MLA,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v32": ("DeepseekV32", {**_DSA, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**_DSA, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"index_topk_freq": 2, "index_skip_topk_offset": 2},
    ),
    LARGE4: (
        "MistralLarge4",
        {**_MLA, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "head_dim": 8}
        | {"num_hidden_layers": 4, "index_n_heads": 12, "index_head_dim": 16, "index_topk": 8, "rms_norm_eps": 1e-5}
        | {"no_rope_layer_interval": 2, "final_logit_softcapping": 3.0, "rope_scaling": None}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0}
            | {"beta_slow": 1.0, "original_max_position_embeddings": 16, "attention_factor": 1.0}
        },
    ),
    POOLED: (
        "Glm5Next",
        {**_MLA, **_DEEPSEEK_MOE, "q_lora_rank": 24, "qk_rope_head_dim": 0, "n_shared_experts": 1, "mla_use_nope": True}
        | {"num_hidden_layers": 4, "index_n_heads": 12, "index_head_dim": 16, "index_topk": 16, "index_kpool": 4}
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "swiglu_limit": 1.5, "rms_norm_eps": 1e-3}
        | {"layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2, "rope_scaling": None}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "hc_mult": 4, "pad_token_id": 0}
        | {"linear_attn_config": {"num_heads": 4, "head_dim": 12, "gate_lower_bound": -5.0}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**_MLA, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
        | {"norm_topk_prob": True, "topk_method": "noaux_tc", "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "youtu": (
        "Youtu",
        {
            name: _MLA[name]
            for name in _MLA
            if "expert" not in name and name not in ("first_k_dense_replace", "rope_scaling")
        }
        | {"q_lora_rank": 24, "rope_interleave": True, "tie_word_embeddings": True},
    ),
    LONGCAT: (
        "LongcatFlash",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "head_dim": 8}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "ffn_hidden_size": 96}
        | {"num_hidden_layers": 4, "expert_ffn_hidden_size": 32, "n_routed_experts": 16, "moe_topk": 5}
        | {"zero_expert_num": 7, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
        | {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
        | {"attention_method": "MLA", "router_bias": False},
    ),
    "llama": ("Llama", {**_GQA, "rope_scaling": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {**_GQA, "sliding_window": None}),
    "qwen2": ("Qwen2", {**_GQA, "use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_GQA, "head_dim": 24}),
    "olmoe": (
        "Olmoe",
        {**_GQA, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "norm_topk_prob": False}
        | {"rms_norm_eps": 1e-5},
    ),
    "flex_olmo": (
        "FlexOlmo",
        {**_GQA, "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 32, "norm_topk_prob": False},
    ),
    "seed_oss": ("SeedOss", {**_GQA, "head_dim": 24, "attention_bias": True, "attention_out_bias": True}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_GQA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 56, "norm_topk_prob": False, "decoder_sparse_step": 1}
        | {"mlp_only_layers": [1], "use_sliding_window": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_GQA, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    ),
    "minimax": (
        "MiniMax",
        {**_GQA, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16}
        | {"full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 0.8}
        | {"mlp_alpha_factor": 1.7, "mlp_beta_factor": 1.3, "rms_norm_eps": 1e-5},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**_GQA, "head_dim": 24, "rotary_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3}
        | {"intermediate_size": 32, "use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    ),
    BLOCK_SPARSE: (
        "MiniMaxM3",
        {**_GQA, "head_dim": 24, "rotary_dim": 12, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai"}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "n_shared_experts": 1}
        | {"shared_intermediate_size": 32, "dense_intermediate_size": 96, "routed_scaling_factor": 2.0}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 1.5, "use_gemma_norm": True, "qk_norm_type": "per_head"}
        | {"moe_layer_freq": [0, 1, 1], "scoring_func": "sigmoid", "use_routing_bias": True}
        | {
            "sparse_attention_config": {"use_sparse_attention": True, "sparse_num_index_heads": 2}
            | {"sparse_index_dim": 16, "sparse_block_size": 8, "sparse_topk_blocks": 3, "sparse_local_block": 1}
            | {"sparse_init_block": 0, "sparse_score_type": "max"}
            | {"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1]}
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**_GQA, **_DEEPSEEK_MOE, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "rms_norm_eps": 1e-5}
        | {"sliding_window": 20, "attention_value_scale": 0.707}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }
        },
    ),
    "afmoe": (
        "Afmoe",
        {**_GQA, "head_dim": 24, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.8, "sliding_window": 20}
        | {"global_attn_every_n_layers": 2, "mup_enabled": True, "rms_norm_eps": 1e-5, "score_func": "sigmoid"}
        | {"route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "gemma2": (
        "Gemma2",
        {**_GQA, "head_dim": 24, "tie_word_embeddings": True, "sliding_window": 20, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {**_GQA, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 20, "sliding_window_pattern": 2}
        | {"rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        | {"tie_word_embeddings": True},
    ),
    "gemma4": (
        "Gemma4",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "global_head_dim": 32}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 20, "intermediate_size": 96}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "final_logit_softcapping": 3.0}
        | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
        | {"moe_intermediate_size": 32, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "llama4": (
        "Llama4",
        {**_GQA, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 32}
        | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2}
        | {"attention_chunk_size": 20, "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.3}
        | {"use_qk_norm": True, "rope_scaling": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    ),
    "laguna": (
        "Laguna",
        {**_GQA, "head_dim": 24, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5, "sliding_window": 20}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "gating": "per-head"}
        | {"num_attention_heads_per_layer": [4, 6, 6], "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "factor": 8.0}
                | {"original_max_position_embeddings": 64, "beta_slow": 1.0, "beta_fast": 4.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            }
        },
    ),
    "step3p7": (
        "Step3p7",
        {"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 24, "intermediate_size": 96}
        | {"moe_num_experts": 16, "moe_top_k": 4, "moe_intermediate_size": 32, "share_expert_dim": 48}
        | {"moe_layers_enum": "1,2", "moe_router_scaling_factor": 3.0, "rms_norm_eps": 1e-5, "sliding_window": 20}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6}
            | {"num_attention_groups": 2, "head_dim": 24}
        }
        | {"rope_theta": [5e6, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 0.5]}
        | {"swiglu_limits": [0.0, 0.0, 0.4], "swiglu_limits_shared": [0.0, 0.0, 0.6]}
        | {"rope_scaling": LLAMA3_ROPE, "yarn_only_types": ["full_attention"], "pad_token_id": 1},
    ),
    "ministral": ("Ministral", {**_GQA, "head_dim": 24, "sliding_window": 20}),
    "olmo2": ("Olmo2", {**_GQA, "rms_norm_eps": 1e-5}),
    "olmo3": (
        "Olmo3",
        {**_GQA, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "sliding_window": 20}
        | {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            }
        },
    ),
    "smollm3": ("SmolLM3", {**_GQA, "tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "exaone4": (
        "Exaone4",
        {**_GQA, "head_dim": 24, "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE, "sliding_window": 20}
        | {"sliding_window_pattern": 2},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**_GQA, **_EXPERTS, "head_dim": 24, "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE, "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_shared_experts": 1}
        | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True},
    ),
    "flint": (
        "Flint",
        {**_GQA, **_EXPERTS, "head_dim": 24, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 20}
        | {"norm_topk_prob": True},
    ),
    "mellum": (
        "Mellum",
        {**_GQA, **_EXPERTS, "head_dim": 24, "sliding_window": 20, "norm_topk_prob": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_type": "yarn", "rope_theta": 500000.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "axk1": (
        "AXK1",
        {**_MLA, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True},
    ),
    "cohere2": (
        "Cohere2",
        {**_GQA, "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True},
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {**_GQA, "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": 20}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "head_dim": 24}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 72}
        | {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32, "num_shared_experts": 2}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": None},
    ),
    "granite": ("Granite", {**_GQA, **_GRANITE}),
    "granitemoe": ("GraniteMoe", {**_GRANITE_MOE, "attention_bias": True}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_GRANITE_MOE, "shared_intermediate_size": 48, "position_embedding_type": "nope"}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 20, "mamba_d_conv": 4, "mamba_chunk_size": 32},
    ),
    "granite_swa": ("GraniteSWA", {**_GQA, **_GRANITE, **_SWA}),
    "granitemoe_swa": ("GraniteMoeSWA", {**_GRANITE_MOE, **_SWA, "shared_intermediate_size": 48}),
    "granitemoeshared": ("GraniteMoeShared", {**_GRANITE_MOE, "shared_intermediate_size": 48}),
    "glm": ("Glm", {**_GQA, "head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": ("Glm4", {**_GQA, "head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4_moe": (
        "Glm4Moe",
        {**_GQA, "head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True}
        | {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True, "rms_norm_eps": 1e-5},
    ),
    "gpt_oss": (
        "GptOss",
        {**_GQA, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
        | {"sliding_window": 20, "swiglu_limit": 1.5, "rope_theta": 150000.0, "rms_norm_eps": 1e-5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_GQA, **DELTA, "num_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3_5": ("Qwen3_5", {**_GQA, **DELTA, "num_hidden_layers": 3}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_GQA, **DELTA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 48},
    ),
    GATED_STREAMS: (
        "Qwen4Exp",
        {**_GQA, **DELTA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 48, "num_hidden_layers": 4, "output_gate_type": "sigmoid"}
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "hc_count": 3, "hc_lowrank": 12}
        | {"ple_layer_ids": [1, 3], "ple_embed_dim": 32, "ngram_size": 3, "heads_per_ngram": 2, "seed": 77}
        | {"ngram_vocab_size_base": 60, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 5}
        | {"indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
        | {"indexer_compress_ratio": 4}
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}},
    ),
    "lfm2": ("Lfm2", {**_GQA, **_LFM2, "block_multiple_of": 24}),
    "lfm2_moe": ("Lfm2Moe", {**_GQA, **_EXPERTS, **_LFM2, "num_dense_layers": 1, "routed_scaling_factor": 1.3}),
    "kimi_linear": (
        "KimiLinear",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 96}
        | {"num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1, "moe_intermediate_size": 32}
        | {"num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446}
        | {"moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
        | {
            "linear_attn_config": {"head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4}
            | {"full_attn_layers": [2], "kda_layers": [1, 3]}
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 96, "head_dim": 20}
        | {"num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1, "moe_intermediate_size": 32}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
        | {"layer_group_size": 3, "short_conv_kernel_size": 4, "kda_safe_gate": True, "kda_lower_bound": -5.0}
        | {"rope_theta": 10000.0},
    ),
    "nemotron_h": (
        "NemotronH",
        {**_GQA, "head_dim": 24, "num_hidden_layers": 6, "hybrid_override_pattern": MIXERS[:6]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 20, "conv_kernel": 4}
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "chunk_size": 32}
        | {"moe_shared_expert_intermediate_size": 48, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "dots1": (
        "Dots1",
        {**_GQA, **_DEEPSEEK_MOE, "n_shared_experts": 2, "first_k_dense_replace": 1, "attention_bias": True}
        | {"sliding_window": None},
    ),
    "solar_open": (
        "SolarOpen",
        {**_GQA, **_DEEPSEEK_MOE, "n_shared_experts": 1, "head_dim": 24, "attention_bias": True},
    ),
    "ernie4_5": ("Ernie4_5", {**_GQA, "head_dim": 24, "tie_word_embeddings": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**_GQA, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {**_GQA, "head_dim": 24}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {**_GQA, "head_dim": 24, "num_experts": 8, "moe_topk": 3, "intermediate_size": 32}
        | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "hy_v3": (
        "HYV3",
        {**_GQA, "head_dim": 24, "num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1}
        | {"moe_intermediate_size": 32, "router_scaling_factor": 2.5, "enable_moe_fp32_combine": False},
    ),
    "ministral3": (
        "Ministral3",
        {**_GQA, "head_dim": 24, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral4": (
        "Mistral4",
        {**_MLA, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 1.5}
        | {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 24}},
    ),
    "phi3": ("Phi3", {**_GQA, "partial_rotary_factor": 0.75, "hidden_size": 64, "tie_word_embeddings": True}),
    "phimoe": (
        "Phimoe",
        {**_GQA, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2, "rms_norm_eps": 1e-5}
        | {"sliding_window": None}
        | {"rope_scaling": PHI_ROPE, "original_max_position_embeddings": 32},
    ),
    "mixtral": ("Mixtral", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def make_checkpoint(
    kind: str,
    directory: str | Path,
    seed: int = 0,
    fp8: bool = False,
    dtype: torch.dtype | str = torch.float32,
    num_mtp_layers: int = 0,
    dialect: str = "hub",
    max_shard_bytes: int | None = None,
    tokenizer: bool = True,
    deepseek_names: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint directory of that kind and returns its path.

    Args:
        kind: one of `KINDS` or `SPARSE_KINDS`.
        fp8: quantize every linear of the decoder layers to e4m3 in 128 x 128 blocks (`weight_scale_inv` siblings);
            `scale_dtype` among the overrides may be float32, ``e8m0`` or ``uint8``.
        dtype: dtype of the unquantized tensors.
        num_mtp_layers: multi-token-prediction modules after the last layer (DeepSeek V3).
        dialect: ``hub`` (rope_theta + rope_scaling, torch_dtype) or ``transformers`` (rope_parameters, dtype).
        max_shard_bytes: split into several files with an index when given.
        deepseek_names: the MTP layers of every kind have DeepSeek's names, which transformers reads.
        overrides: fields of config.json.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    scale_dtype = overrides.pop("scale_dtype", "float32")
    vision = overrides.pop("vision", {})
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    fields = _stretched(_COMMON | _FAMILY[kind][1] | overrides)
    _save_model(_FAMILY[kind][0], fields | {"vision": vision} if vision else fields, seed, dtype, path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    for index in range(num_mtp_layers):
        if kind == GATED_STREAMS:
            tensors |= gated_streams_mtp(tensors, generator)
        elif kind == LONGCAT:
            add_longcat_mtp(tensors, fields["hidden_size"], generator)
        elif kind == "step3p7":
            add_step_mtp(tensors, fields, index, generator)
        elif kind == "nemotron_h":
            add_nemotron_mtp(tensors, fields["hybrid_override_pattern"], index, generator)
        else:
            add_mtp_layer(tensors, fields["num_hidden_layers"], index, fields["hidden_size"], generator)
    if kind == "kimi_linear" and dialect == "hub":  # the published name of the dense layer's MLP
        dense = ".0.block_sparse_moe."
        tensors = {name.replace(dense, ".0.mlp."): t for name, t in tensors.items()}
    if kind == "bailing_hybrid" and dialect == "hub":  # the published name of delta attention's output projection
        delta = {name.removesuffix("f_proj.weight") for name in tensors if name.endswith(".f_proj.weight")}
        renamed = {f"{prefix}dense.weight": f"{prefix}o_proj.weight" for prefix in delta}
        tensors = {renamed.get(name, name): t for name, t in tensors.items()}
    if kind == "step3p7":
        fields = with_mtp_fields(fields, num_mtp_layers)
        fields |= {"num_nextn_predict_layers": num_mtp_layers} if num_mtp_layers else {}
    if kind == GATED_STREAMS:
        fields["mtp_num_hidden_layers"] = num_mtp_layers
    elif num_mtp_layers and not deepseek_names and kind != LONGCAT:
        tensors = _with_own_names(kind, tensors, f"model.layers.{fields['num_hidden_layers']}.")
    if kind == POOLED:
        fields["num_nextn_predict_layers"] = num_mtp_layers
    if num_mtp_layers and kind == BLOCK_SPARSE:
        fields["num_mtp_modules"] = num_mtp_layers
        tensors = with_minimax_mtp(tensors, fields["num_hidden_layers"])
    if num_mtp_layers and kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        tensors = _beside(tensors, f"model.layers.{fields['num_hidden_layers']}.")
    if fp8:
        tensors = quantize_fp8(tensors, scale_dtype)
    (path / "model.safetensors").unlink()
    write_tensors(path, tensors, max_shard_bytes)
    _write_config(path, fields, dtype, num_mtp_layers, fp8, dialect)
    if tokenizer:
        write_tokenizer(path, fields["vocab_size"])
    return path


def _stretched(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with MiniMax-M3's lists by layer as long as the model: further layers are like the last one. The
    same for Nemotron-H's pattern, whose last layer is attention if no other is."""
    if fields.get("hybrid_override_pattern") == _FAMILY["nemotron_h"][1]["hybrid_override_pattern"]:
        kinds = MIXERS[: fields["num_hidden_layers"]]
        return fields | {"hybrid_override_pattern": kinds if "*" in kinds else f"{kinds[:-1]}*"}
    sparse = fields.get("sparse_attention_config")
    if not isinstance(sparse, dict):
        return fields
    count = fields["num_hidden_layers"]

    def stretch(part: dict[str, Any]) -> dict[str, Any]:
        lists = {name: value for name, value in part.items() if name.startswith(("moe_layer_", "sparse_"))}
        long = {n: [*v, *v[-1:] * count][:count] for n, v in lists.items() if isinstance(v, list)}
        return part | long

    return stretch(fields) | {"sparse_attention_config": stretch(sparse)}


def hub_fields(kind: str) -> dict[str, Any]:
    """config.json's fields of a kind."""
    return copy.deepcopy(_COMMON | _FAMILY[kind][1])


def headless(source: Path, directory: Path, **scores: Tensor) -> Path:
    """A copy of a checkpoint as transformers saves a model without a head: architecture `XModel`, no lm_head, no
    prefix. With `scores`, tensors of a head (`score_weight`): `XForSequenceClassification` or `Qwen2ForRewardModel`."""
    shutil.copytree(source, directory)
    tensors = {k: t for k, t in load_file(source / "model.safetensors").items() if not k.startswith("lm_head")}
    config = json.loads((source / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    if not scores:
        tensors, name = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}, f"{family}Model"
    else:
        tensors |= {key.replace("_", "."): tensor for key, tensor in scores.items()}
        name = f"{family}ForSequenceClassification" if "score_weight" in scores else f"{family}ForRewardModel"
        labels = len(next(reversed(scores.values())))
        config |= {"id2label": {str(i): f"class {i}" for i in range(labels)}}
        config |= {"label2id": {f"class {i}": i for i in range(labels)}}
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [name]}, indent=1))
    return directory


def _save_model(family: str, fields: dict[str, Any], seed: int, dtype: torch.dtype, path: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    if family == "MiniMaxM3":
        config, model_class = _with_small_tower(fields), transformers.MiniMaxM3SparseForConditionalGeneration
    elif family == "Glm5Next":
        config, model_class = _glm5_next(fields), transformers.Glm5NextForConditionalGeneration
    elif family == "MistralLarge4":
        config, model_class = _mistral_large4(fields), transformers.MistralLarge4ForConditionalGeneration
    elif family == "Step3p7":
        config, model_class = _step3p7(fields), transformers.Step3p7ForConditionalGeneration
    elif family == "Qwen4Exp":
        config, model_class = _qwen4_exp(fields), transformers.Qwen4ExpForConditionalGeneration
    else:
        text = "Text" if family.startswith(("Qwen3_5", "Llama4", "Gemma3", "Gemma4")) else ""
        config = getattr(transformers, f"{family}{text}Config")(**copy.deepcopy(fields))
        model_class = getattr(transformers, f"{family}ForCausalLM")
    transformers.AutoModelForCausalLM.register(type(config), model_class, exist_ok=True)  # of Mistral4, which is not
    model = model_class(config).float()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name and name.endswith(".bias"):
            tensor.data = 0.3 * torch.randn_like(tensor)
        elif "norm" in name or name.endswith((".layer_scalar", ".router.scale", ".per_expert_scale")):
            stored_less = family.startswith(
                ("Qwen3Next", "Qwen3_5", "Qwen4Exp", "MiniMaxM3", "Step3p7", "Gemma2", "Gemma3")
            )
            less = stored_less and "linear_attn" not in name
            tensor.data = (0.0 if less else 1.0) + 0.2 * torch.randn_like(tensor)
        elif name.endswith("embed_tokens.weight"):  # of a padding token zeros
            empty = ~tensor.data.any(1)
            tensor.data[empty] = 0.15 * torch.randn(int(empty.sum()), tensor.shape[1])
        elif "softmax_scaling" in name:
            tensor.data = 0.3 + 0.2 * torch.randn_like(tensor)
        elif name.endswith("rotary_emb.alpha"):
            tensor.data = 0.3 * torch.randn_like(tensor)
        elif name.endswith("A_log"):
            tensor.data = torch.empty_like(tensor).uniform_(0.02, 1.0).log()
        elif name.endswith(".D"):
            tensor.data = 1.0 + 0.5 * torch.randn_like(tensor)
        elif name.endswith(("conv1d.weight", ".conv.conv.weight")):
            tensor.data = 0.5 * torch.randn_like(tensor)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data = 0.1 * torch.randn_like(tensor)
        elif name.endswith((".bias", "_bias")):
            tensor.data = 0.3 * torch.randn_like(tensor)
        elif name.endswith(("_hc.base", "_hc.scale", "_compress_ape", "_compress_gate")):
            tensor.data = name.endswith("scale") + 0.3 * torch.randn_like(tensor)
        elif name.endswith("_hc.fn"):
            tensor.data = 0.1 * torch.randn_like(tensor)
        elif name.endswith(".sinks"):
            tensor.data = torch.randn_like(tensor)
    for name, parameter in model.named_parameters():
        if not name.endswith("e_score_correction_bias"):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(path)
    torch.random.set_rng_state(state)


def _with_small_tower(fields: dict[str, Any]) -> Any:
    """MiniMax-M3's config; the text model's fields are `fields`."""
    import transformers

    tower = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.MiniMaxM3VLConfig(
        text_config=copy.deepcopy(fields),
        vision_config=tower | {"patch_size": 4, "image_size": 32},
        projector_hidden_size=fields["hidden_size"],
        image_token_index=fields["vocab_size"] - 1,
        video_token_index=fields["vocab_size"] - 2,
    )


def _glm5_next(fields: dict[str, Any]) -> Any:
    """GLM-5.3-Flash's config with a small tower; the text model's fields are `fields`."""
    import transformers

    tower = {"hidden_size": 48, "intermediate_size": 64, "depth": 1, "num_heads": 2, "projection_intermediate_size": 64}
    kinds = {"deepseek_sparse_attention": "indexed_attention"}
    text = fields | {"layer_types": [kinds.get(kind, kind) for kind in fields["layer_types"]]}
    tower |= {"out_hidden_size": fields["hidden_size"]} | text.pop("vision", {})
    return transformers.Glm5NextConfig(
        text_config=copy.deepcopy(text),
        vision_config=tower,
        image_token_id=fields["vocab_size"] - 1,
        video_token_id=fields["vocab_size"] - 2,
    )


def _mistral_large4(fields: dict[str, Any]) -> Any:
    """The config of Mistral Large 4 with a small tower; the text model's fields are `fields`."""
    import transformers

    text = {name: value for name, value in copy.deepcopy(fields).items() if value is not None or name != "rope_scaling"}
    tower = {"model_type": "pixtral", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "patch_size": 4, "image_size": 32, "hidden_act": "silu"} | text.pop(
        "vision", {}
    )
    image = fields["vocab_size"] - 4  # before the tokens after rows
    return transformers.MistralLarge4Config(text_config=text, vision_config=tower, image_token_index=image)


def _step3p7(fields: dict[str, Any]) -> Any:
    """Step 3.7's config with a small tower; the text model's fields are `fields`."""
    import transformers

    tower = {"width": 48, "layers": 1, "heads": 2, "mlp_ratio": 1.0, "patch_size": 4, "image_size": 32}
    return transformers.Step3p7Config(
        text_config=copy.deepcopy(fields), vision_config=tower, image_token_id=fields["vocab_size"] - 1
    )


def _qwen4_exp(fields: dict[str, Any]) -> Any:
    """The config of Qwen3.8-Flash-Next with a small tower; the text model's fields are `fields`."""
    import transformers

    tower = {"hidden_size": 48, "intermediate_size": 64, "depth": 1, "num_heads": 2, "num_position_embeddings": 36}
    text = copy.deepcopy(fields)
    tower |= {"out_hidden_size": fields["hidden_size"]} | text.pop("vision", {})
    return transformers.Qwen4ExpConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=fields["vocab_size"] - 1,
        video_token_id=fields["vocab_size"] - 2,
        vision_start_token_id=fields["vocab_size"] - 3,
        vision_end_token_id=fields["vocab_size"] - 4,
    )


def _with_own_names(kind: str, tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The MTP layer under the names that Hy3, ERNIE and Ling publish, instead of DeepSeek's."""
    if kind == "hy_v3":
        parts = {"shared_head.norm.": "final_layernorm.", "shared_head.head.": "shared_head."}
        names = {name: f"{layer}{_swapped(name.removeprefix(layer), parts)}" for name in tensors if layer in name}
    elif kind == "ernie4_5_moe":
        tensors = {name: t for name, t in tensors.items() if not name.startswith((f"{layer}emb", f"{layer}shared"))}
        parts = {"enorm.": "mtp_emb_norm.0.", "hnorm.": "mtp_hidden_norm.0.", "eh_proj.": "mtp_linear_proj.0."}
        parts[""] = "mtp_block.0."
        names = {name: f"model.{_swapped(name.removeprefix(layer), parts)}" for name in tensors if layer in name}
    elif kind == "bailing_hybrid":
        copies = (f"{layer}embed_tokens.", f"{layer}shared_head.head.")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(copies)}
        names = {f"{layer}shared_head.norm.weight": f"{layer}final_layernorm.weight"}
    else:
        return tensors
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def with_minimax_mtp(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The MTP layers under the names that MiniMax-M3 publishes, instead of DeepSeek's."""
    parts = {"shared_head.norm.": "final_layernorm.", "enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
    found = {}
    for name, tensor in tensors.items():
        layer = re.match(r"(language_model\.model\.)layers\.(\d+)\.(.+)", name)
        if layer is None or int(layer[2]) < num_layers:
            found[name] = tensor
        elif not layer[3].startswith(("embed_tokens.", "shared_head.head.")):
            rest = _swapped(layer[3], parts | {"": "transformer_layer."})
            found[f"{layer[1]}mtp.layers.{int(layer[2]) - num_layers}.{rest}"] = tensor
    return found


def _swapped(name: str, parts: dict[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in parts.items() if name.startswith(old)), name)


def add_mtp_layer(
    tensors: dict[str, Tensor], num_layers: int, index: int, hidden: int, generator: torch.Generator
) -> None:
    ernie = any("moe_statics" in name for name in tensors)
    like_it = 1 if "model.layers.0.linear_attn.A_log" in tensors else num_layers - 1  # the last layer with attention
    like_it = 0 if ernie else like_it  # a dense layer
    text = "language_model." if "language_model.model.norm.weight" in tensors else ""  # whose norms are stored less 1
    base = "model.language_model." if "model.language_model.norm.weight" in tensors else f"{text}model."
    source, target = f"{base}layers.{like_it}.", f"{base}layers.{num_layers + index}."
    like = tensors[f"{base}norm.weight"]
    noise = partial(torch.randn, generator=generator)

    for name in [name for name in tensors if name.startswith(source) and ".hc_" not in name]:
        tensor = tensors[name]
        tensors[name.replace(source, target)] = (tensor.float() + 0.1 * noise(*tensor.shape)).to(tensor.dtype)
    ling = "model.word_embeddings.weight"
    embedding = ling if ling in tensors else f"{base}embed_tokens.weight"
    tensors[target + "embed_tokens.weight"] = tensors[embedding].clone()
    head = f"{text}lm_head.weight" if f"{text}lm_head.weight" in tensors else embedding
    tensors[target + "shared_head.head.weight"] = tensors[head].clone()
    tensors[target + "eh_proj.weight"] = (0.15 * noise(hidden, 2 * hidden)).to(like.dtype)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{target}{name}.weight"] = ((not text) + 0.2 * noise(hidden)).to(like.dtype)
    if ernie:
        tensors[f"{target}shared_head.norm.weight"] = like.clone()


def gated_streams_mtp(tensors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The MTP layer of Qwen3.8-Flash-Next, under its published names: like the last layer with attention."""
    mixer = "hyper_connection_mixer."
    base = next(name for name in tensors if name.endswith(f"{mixer}hc_norm.weight")).partition(mixer)[0]
    layer = max(int(name.split(".self_attn.")[0].rpartition(".")[2]) for name in tensors if ".self_attn." in name)
    parts = {f"{base}layers.{layer}.": "mtp.layers.0.", f"{base}{mixer}": f"mtp.{mixer}"}
    found = {_swapped(name, parts): t for name, t in tensors.items() if name.startswith(tuple(parts))}
    found = {name: t + (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype) for name, t in found.items()}
    like, hidden = found[f"mtp.{mixer}hc_norm.weight"], tensors[f"{base}embed_tokens.weight"].shape[1]
    shapes = {"fc_embedding": (hidden, hidden), "fc_hidden": (hidden, hidden)}
    shapes |= {"pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": tuple(like.shape)}
    for name, shape in shapes.items():
        found[f"mtp.{name}.weight"] = (0.2 * torch.randn(shape, generator=generator)).to(like.dtype)
    return found


def add_longcat_mtp(tensors: dict[str, Tensor], hidden: int, generator: torch.Generator) -> None:
    """The dense MTP layer of LongCat-Flash, under its published names."""
    target = "model.mtp.layers.0."
    parts = {"mlps.1.": "transformer_layer.mlp."}
    parts |= {f"{part}.1.": f"{part}." for part in ("self_attn", "input_layernorm", "post_attention_layernorm")}
    like = tensors["model.norm.weight"]
    noise = partial(torch.randn, generator=generator)

    for old, new in parts.items():
        source = f"model.layers.0.{old}"
        for name in [name for name in tensors if name.startswith(source)]:
            tensor = tensors[name]
            changed = (tensor.float() + 0.1 * noise(*tensor.shape)).to(tensor.dtype)
            tensors[f"{target}{new}{name.removeprefix(source)}"] = changed
    tensors["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{target}eh_proj.weight"] = (0.15 * noise(hidden, 2 * hidden)).to(like.dtype)
    for name in (f"{target}enorm.m", f"{target}hnorm.m", "model.mtp.norm"):
        tensors[f"{name}.weight"] = (1 + 0.2 * noise(hidden)).to(like.dtype)


def with_mtp_beside(tensors: dict[str, Tensor], num_layers: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors, and those of an MTP layer under the names of Qwen3-Next and Qwen3.5."""
    tensors = dict(tensors)
    hidden = tensors["model.norm.weight"].shape[0]
    add_mtp_layer(tensors, num_layers, 0, hidden, generator)
    return _beside(tensors, f"model.layers.{num_layers}.")


def _beside(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The MTP layer under Qwen3-Next's names, norms less 1."""
    parts = {"eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden."}
    parts |= {"shared_head.norm.": "norm.", "embed_tokens.": "", "shared_head.head.": ""}
    found = {}
    for name, tensor in tensors.items():
        part = name.removeprefix(layer)
        own = next((known for known in parts if part.startswith(known)), None)
        if part == name:
            found[name] = tensor
        elif own is None:
            found[f"mtp.layers.0.{part}"] = tensor
        elif parts[own]:
            found[f"mtp.{parts[own]}{part.removeprefix(own)}"] = tensor - 1 if "norm" in own else tensor
    return found


def join_experts(path: Path) -> None:
    """Puts the experts of each layer of a checkpoint into common tensors [E, 2I, D] and [E, D, I], in one file."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    first = "0.gate_proj.weight"
    blocks = {name.removesuffix(first) for name in tensors if name.endswith(f".experts.{first}")}
    assert blocks
    for block in blocks:
        count = sum(name.startswith(block) and name.endswith(".gate_proj.weight") for name in tensors)
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}gate_up_proj": torch.cat((gate, up), 1), f"{block}down_proj": down}
    write_tensors(path, tensors)


def dequantized_copy(source: Path, directory: str | Path) -> Path:
    """A checkpoint directory with the FP8 weights of `source` dequantized and quantization_config dropped."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    write_tensors(path, dequantize_fp8(tensors, dtype=torch.float32))
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def write_tensors(path: Path, tensors: dict[str, Tensor], max_shard_bytes: int | None = None) -> None:
    """One model.safetensors, or shards and an index when a limit is given (scales in other shards than weights)."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if max_shard_bytes is None:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors, key=lambda n: (n.endswith("_scale_inv"), n)):
        size = tensors[name].numel() * tensors[name].element_size()
        if filled and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors[name]
        filled += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_config(
    path: Path, fields: dict[str, Any], dtype: torch.dtype, num_mtp_layers: int, fp8: bool, dialect: str
) -> None:
    config = json.loads((path / "config.json").read_text())
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        (path / "config.json").write_text(json.dumps(config, indent=1))
    if "text_config" in config and dialect == "hub":  # as published
        left_out = ("initializer_range", *(("pad_token_id",) if fields["pad_token_id"] is None else ()))
        own = {key: value for key, value in fields.items() if key not in left_out}
        config["text_config"] = {"model_type": config["text_config"]["model_type"], **own}
        config["torch_dtype"] = config.pop("dtype")
        (path / "config.json").write_text(json.dumps(config, indent=1))
    if "text_config" in config:
        return
    config["num_nextn_predict_layers"] = num_mtp_layers
    if not num_mtp_layers and not config["model_type"].startswith(("qwen3_next", "qwen3_5", LONGCAT)):  # default 1
        del config["num_nextn_predict_layers"]
    name = str(dtype).removeprefix("torch.")
    if dialect == "hub":
        for key in ("rope_parameters", "dtype", "head_dim", "transformers_version", "layers_block_type"):
            config.pop(key, None)
        config |= {key: value for key, value in fields.items() if key != "initializer_range"}
        if "num_layers" in config:  # LongCat-Flash
            del config["num_hidden_layers"]
        config["torch_dtype"] = name
    else:
        config["dtype"] = name
        config.pop("hybrid_override_pattern", None)
        config |= {k: fields[k] for k in ("topk_method", "scoring_func", "moe_layer_freq") if k in fields}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": fields["bos_token_id"], "eos_token_id": fields["eos_token_id"]})
    )
