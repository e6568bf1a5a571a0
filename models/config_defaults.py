"""Fields that config.json may leave out, where the family's value differs from that of most families. A field that is
null stays null, but for rotary settings. Imports no torch.

Source: defaults of transformers' config classes. `tests/models/random_shapes.py` drops fields and compares logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EPS: Mapping[str, Any] = {"rms_norm_eps": 1e-5}
_YARN: Mapping[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_SCALED: Mapping[str, Any] = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_COHERE2: Mapping[str, Any] = {"sliding_window": 4096, "tie_word_embeddings": True}
_DEEPSEEK_V3: Mapping[str, Any] = {
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}  # fmt: skip
_INDEXED: Mapping[str, Any] = {
    **_EPS, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "num_experts_per_tok": 8, "index_topk": 2048,
}  # fmt: skip
_ERNIE: Mapping[str, Any] = {**_EPS, "rope_theta": 500000.0, "tie_word_embeddings": True}
_GLM: Mapping[str, Any] = {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2}
_GEMMA: Mapping[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
}  # fmt: skip
"""Published files of Gemma 3 state little more than what differs from this."""
_LFM2: Mapping[str, Any] = {"rope_theta": 1000000.0, "tie_word_embeddings": True, "num_key_value_heads": 8}
_VISUAL: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {**_EPS, "rope_theta": 1e6}, "qwen2_5_vl": {**_EPS, "rope_theta": 1e6},
    "qwen3_vl": {"rope_theta": 5e5}, "qwen3_vl_moe": {"rope_theta": 5e5, "num_experts_per_tok": 4},
    "glm4v": {**_EPS, "num_key_value_heads": 2, "image_token_id": 151343, "video_token_id": 151344},
    "glm4v_moe": {
        **_EPS, "attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_routed_experts": 128, "image_token_id": 151363, "video_token_id": 151364,
    },
}  # fmt: skip
_POSITIONS: Mapping[int, str] = {
    2048: "llama deepseek_v2 dots1 exaone4 exaone_moe granite granitemoe granitemoehybrid granitemoeshared "
    "granitemoe_swa hunyuan_v1_dense hunyuan_v1_moe olmo2 olmo3",
    4096: "deepseek_v3 nemotron_h phi3 olmoe flex_olmo",
    32768: "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text qwen2_vl_text qwen2_5_vl_text "
    "smollm3 axk1 glm4v glm4v_text",
    65536: "glm4v_moe glm4v_moe_text",
    128000: "qwen3_vl_text qwen3_vl_moe_text lfm2 lfm2_moe",
    131072: "longcat_flash mistral ministral mixtral glm4_moe gpt_oss mimo_v2 mimo_v2_flash solar_open ernie4_5 "
    "ernie4_5_moe hy_v3 phimoe minimax glm glm4 gemma3_text gemma4_text mellum youtu",
    163840: "deepseek_v32", 196608: "minimax_m2", 202752: "glm4_moe_lite glm_moe_dsa", 262144: "ministral3 flint",
    8192: "cohere2 cohere2_moe gemma2 granite_swa",
    524288: "seed_oss", 1048576: "mistral4 mistral_large4_text glm5_next_text deepseek_v4",
}  # fmt: skip
"""`max_position_embeddings` by default, and the values of `model_type`."""
_BY_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "rope_theta": 6000000.0, "max_position_embeddings": 262144,
    },
    "cohere2": _COHERE2,
    "cohere2_moe": {**_COHERE2, "head_dim": 128, "num_experts_per_tok": 2, "num_experts": 8},
    "axk1": {**_DEEPSEEK_V3, "first_k_dense_replace": 1},
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": {**_DEEPSEEK_V3, "index_topk": 2048},
    "dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    "ernie4_5": {**_ERNIE, "head_dim": 128},
    "ernie4_5_moe": _ERNIE,
    "deepseek_v2": {"n_shared_experts": 2},
    "glm": _GLM,
    "glm4": _GLM,
    "gemma2": {
        **_GEMMA, "vocab_size": 256000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA,
    "gemma4_text": {
        **_GEMMA, "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "rope_scaling": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "glm4_moe": {**_EPS, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts_per_tok": 8},
    "glm4_moe_lite": {**_EPS, "routed_scaling_factor": 1.8, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "glm5_next_text": _INDEXED,
    "glm_moe_dsa": {**_INDEXED, "first_k_dense_replace": 3},
    **{f"granitemoe{part}": {"num_experts_per_tok": 2, "num_local_experts": 8} for part in ("", "shared", "hybrid")},
    "granite_swa": {**_EPS, "tie_word_embeddings": True, "num_key_value_heads": 4, "sliding_window": 128},
    "granitemoe_swa": {"num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": 128},
    "gpt_oss": {
        **_EPS, "sliding_window": 128, "rope_theta": 150000.0, "num_experts_per_tok": 4,
        "rope_scaling": {**_YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    },
    "hunyuan_v1_dense": _EPS,
    "hunyuan_v1_moe": _EPS,
    "hy_v3": {
        **_EPS, "rope_theta": 11158840.0, "router_scaling_factor": 2.826, "first_k_dense_replace": 1,
        "num_experts_per_tok": 8,
    },
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "num_experts_per_tok": 4, "num_experts": 32},
    "kimi_linear": {
        **_EPS, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "max_position_embeddings": 1048576,
    },
    "longcat_flash": {
        **_EPS, "rope_theta": 1e7, "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256,
        "routed_scaling_factor": 6.0,
    },
    **{f"mimo_v2{part}": {"num_experts_per_tok": 8} for part in ("", "_flash")},
    **{f"llama4{part}": {"attention_chunk_size": 8192, "rope_theta": 500000.0} for part in ("", "_text")},
    "minimax": {**_EPS, "rope_theta": 1000000.0, "num_experts_per_tok": 2, "num_local_experts": 8},
    "minimax_m2": {"rope_theta": 5000000.0, "num_experts_per_tok": 8},
    **{
        f"minimax_m3{part}": {"rope_theta": 5000000.0, "head_dim": 128} for part in ("", "_vl", "_vl_text")
    },
    "ministral3": {
        **_EPS, "head_dim": 128,
        "rope_scaling": {**_SCALED, "factor": 16.0, "original_max_position_embeddings": 16384}
        | {"rope_theta": 1000000.0},
    },
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "exaone4": {**_EPS, "sliding_window": 4096},
    "exaone_moe": {
        **_EPS, "sliding_window": 4096, "first_k_dense_replace": 1, "num_experts": 64, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "routed_scaling_factor": 2.5,
    },
    "flex_olmo": {"rope_theta": 500000.0, "num_experts_per_tok": 5, "num_experts": 7},
    "flint": {
        "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 513, "num_experts": 256, "num_experts_per_tok": 6,
        "shared_expert_intermediate_size": 1024,
    },
    "mellum": {"head_dim": 128, "num_key_value_heads": 4, "sliding_window": 1024, "num_experts_per_tok": 8},
    "olmo2": _EPS,
    "olmo3": {**_EPS, "rope_theta": 500000.0, "sliding_window": 4096},
    "smollm3": {"rope_theta": 2000000.0, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral4": {
        "norm_topk_prob": True, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "rope_scaling": {**_SCALED, "factor": 128.0, "original_max_position_embeddings": 8192}
        | {"rope_theta": 10000.0},
    },
    "mistral_large4_text": {
        **_EPS, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "index_topk": 2048,
        "rope_scaling": {**_YARN, "factor": 2048.0, "original_max_position_embeddings": 512, "attention_factor": 1.0}
        | {"rope_theta": 10000.0},
    },
    "mixtral": {**_EPS, "rope_theta": 1000000.0, "num_experts_per_tok": 2},
    "olmoe": {**_EPS, "num_experts_per_tok": 8, "num_experts": 64},
    "phi3": _EPS,
    "phimoe": {**_EPS, "rope_theta": 1000000.0, "num_experts_per_tok": 2, "num_local_experts": 16},
    "qwen2_moe": {"num_experts_per_tok": 4, "num_experts": 60, "shared_expert_intermediate_size": 5632},
    "qwen3_5_moe_text": {"num_experts_per_tok": 8, "linear_conv_kernel_dim": 4},
    "qwen3_5_text": {"linear_conv_kernel_dim": 4},
    "qwen3_moe": {"num_experts_per_tok": 8},
    "qwen3_next": {"num_experts_per_tok": 10, "linear_conv_kernel_dim": 4},
    "seed_oss": {"head_dim": 128},
    "solar_open": {
        **_EPS, "head_dim": 128, "rope_theta": 1000000.0, "intermediate_size": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    },
    "youtu": {"tie_word_embeddings": True},
    **{kind + part: fields for kind, fields in _VISUAL.items() for part in ("", "_text")},
}  # fmt: skip


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json (of the text model), with the defaults of its `model_type`."""
    kind = str(raw.get("model_type"))
    own = dict(_BY_MODEL_TYPE.get(kind, {}))
    if lengths := [length for length, kinds in _POSITIONS.items() if kind in kinds.split()]:
        own["max_position_embeddings"] = lengths[0]
    if "rope_scaling" in own and raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        return {**own, **raw, "rope_scaling": own["rope_scaling"]}
    own.pop("rope_scaling", None)
    return {**own, **raw}
