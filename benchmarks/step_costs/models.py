"""True shapes of models as config.json, and the same with two layers of each kind, the last of which represents all
further layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.step_costs.layers import LAYER_TYPES, V41, kinds_of

KEPT = 2
"""Layers of each kind that run: the last represents all further layers."""

_COMMON: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    "rope_theta": 10000, "max_position_embeddings": 163840, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
_BLOCK_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "v2-lite": _COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
    },
    "v3": _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "vocab_size": 129280,
        "num_nextn_predict_layers": 1,
        "quantization_config": _BLOCK_FP8,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
        "attention_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 199998, "eos_token_id": 200002,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "bos_token_id": 151643, "eos_token_id": 151645,
    },
}  # fmt: skip
MODELS["kimi-k2"] = MODELS["v3"] | {
    "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
    "routed_scaling_factor": 2.827, "rope_theta": 50000, "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    },
}  # fmt: skip
"""K2-Thinking and the text of K2.5: routed experts in integers of 4 bits."""
MODELS["v3.2"] = MODELS["v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64,
    "index_head_dim": 128,
}  # fmt: skip

MODELS["v4-flash"] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 20 + ["compressed_sparse_attention"],
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "num_hash_layers": 3, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "vocab_size": 129280, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000,
    "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4",
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "quantization_config": _BLOCK_FP8 | {"scale_fmt": "ue8m0"},
}  # fmt: skip
MODELS["v4-pro"] = MODELS["v4-flash"] | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "layer_types": ["heavily_compressed_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 29 + ["compressed_sparse_attention"],
    "index_topk": 1024, "moe_intermediate_size": 3072, "n_routed_experts": 384, "routed_scaling_factor": 2.5,
}  # fmt: skip

MODELS["v41-flash"] = MODELS["v4-flash"] | {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": V41, "hidden_size": 5120, "num_hidden_layers": 40,
    "q_lora_rank": 1280, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8, "index_n_heads": 32,
    "moe_intermediate_size": 2304, "n_routed_experts": 384, "engram_layer_ids": [1, 14], "engram_max_ngram_size": 4,
    "engram_num_embeddings": [384006168, 384016682], "engram_vocab_size": 16000000, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "num_hash_layers": 0,
    "topk_method": "noaux_tc", "quantization_config": _BLOCK_FP8 | {"scale_fmt": "ue8m0"},
}  # fmt: skip
"""The language model, with FP8 blocks of 128 x 128 in place of the published ones of 32 x 32."""
del MODELS["v41-flash"]["layer_types"]

MODELS["glm-4.6"] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000,
    "vocab_size": 151552, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": _BLOCK_FP8,
}  # fmt: skip
"""In block FP8, as --quantization gives it."""

MODELS["minimax-m3"] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_vl_text", "hidden_size": 6144,
    "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
    "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rotary_dim": 64,
    "partial_rotary_factor": 0.5, "rope_theta": 5000000, "vocab_size": 200064, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "swigluoai", "bos_token_id": 200019, "eos_token_id": 200020,
    "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
    "index_local_blocks": 1, "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57, "quantization_config": _BLOCK_FP8,
}  # fmt: skip
"""The text model, in block FP8, as --quantization gives it."""

MODELS["llama-8b-awq"] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "rope_theta": 500000, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "float16", "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
}  # fmt: skip
"""Llama 3.1 8B: every projection of a layer in integers of 4 bits."""

_ROW_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
}  # fmt: skip
MODELS["llama-8b-row-fp8"] = MODELS["llama-8b-awq"] | {"torch_dtype": "bfloat16", "quantization_config": _ROW_FP8}
MODELS["v3-row-fp8"] = MODELS["v3"] | {
    "quantization_config": _ROW_FP8 | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]},
}  # fmt: skip
"""In FP8 with a scale for each row, as llm-compressor writes it."""

MODELS["glm-5.3-flash"] = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next_text", "hidden_size": 4096,
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 3,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "mhc": True, "hc_mult": 4, "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20, "mla_use_nope": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "index_kpool": 4, "index_kpool_compress": True, "index_kpool_always_select_tail": True, "swiglu_limit": 10.0,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "vocab_size": 154880, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 154820, "linear_num_key_heads": 64,
    "linear_num_value_heads": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
}  # fmt: skip
"""The text model, in bfloat16, as published."""

DRAFT_MODEL = _COMMON | MODELS["v2-lite"] | {"num_hidden_layers": 4, "first_k_dense_replace": 4}
"""The draft model of the drafter "standalone": four dense layers of V2-Lite's widths, with the target's vocabulary."""


def draft_model(folder: Path, target: dict[str, Any]) -> Path:
    """Its folder, below `folder`."""
    path = folder / "draft"
    path.mkdir()
    path.joinpath("config.json").write_text(json.dumps(DRAFT_MODEL | {"vocab_size": target["vocab_size"]}))
    return path


def config_of(model: str) -> dict[str, Any]:
    """The fields of a model by name, or of a folder's config.json.

    Raises:
        ValueError: neither.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ValueError(f"{model!r} is neither of {', '.join(MODELS)} nor a folder with a config.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def shortened(config: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """The config with at most `KEPT` layers of each kind, and the number of layers that each represents."""
    kinds = kinds_of(config)
    kept = sorted(i for kind in set(kinds) for i in [j for j, other in enumerate(kinds) if other == kind][:KEPT])
    last = {kinds[i]: i for i in kept}
    counts = [kinds.count(kinds[i]) - KEPT + 1 if last[kinds[i]] == i and kinds.count(kinds[i]) > KEPT else 1
              for i in kept]  # fmt: skip
    short = config | {"num_hidden_layers": len(kept)}
    if "first_k_dense_replace" in config:
        short["first_k_dense_replace"] = sum(not kinds[i][1] for i in kept)
    if "mlp_layer_types" in config:
        short["mlp_layer_types"] = [config["mlp_layer_types"][i] for i in kept]
    if config["model_type"] == V41:
        return short | _shared_layers(config, kept), counts
    if len({mixer for mixer, _ in kinds}) > 1:
        short["layer_types"] = [LAYER_TYPES[kinds[i][0]] for i in kept]
    return short, counts


def _shared_layers(config: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """DeepSeek V4.1's fields of layers: both n-gram tables are before layers that represent themselves."""
    found = {name: [kept.index(i) for i in config[name] if i in kept]
             for name in ("kv_source_layer_ids", "index_source_layer_ids")}  # fmt: skip
    return found | {
        "compress_ratios": [config["compress_ratios"][i] for i in kept],
        "candidate_source_layer_id": kept.index(config["candidate_source_layer_id"]),
        "engram_layer_ids": [kept.index(1), kept.index(config["kv_source_layer_ids"][0])],
    }
