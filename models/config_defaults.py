"""Fields that config.json may leave out, where the family's value differs from that of most families. A field that is
null stays null. Imports no torch.

Source: defaults of transformers' config classes. `tests/models/random_shapes.py` drops fields and compares logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EPS: Mapping[str, Any] = {"rms_norm_eps": 1e-5}
_YARN: Mapping[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_SCALED: Mapping[str, Any] = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_DEEPSEEK_V3: Mapping[str, Any] = {
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
}  # fmt: skip
_ERNIE: Mapping[str, Any] = {**_EPS, "rope_theta": 500000.0, "tie_word_embeddings": True}
_THETAS = {"qwen2_vl": 1e6, "qwen2_5_vl": 1e6, "qwen3_vl": 5e5, "qwen3_vl_moe": 5e5}
_BY_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "rope_theta": 6000000.0, "max_position_embeddings": 262144,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
    "ernie4_5": {**_ERNIE, "head_dim": 128},
    "ernie4_5_moe": _ERNIE,
    "glm4_moe": _EPS,
    "glm4_moe_lite": {**_EPS, "routed_scaling_factor": 1.8},
    "glm_moe_dsa": {**_EPS, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    "gpt_oss": {
        **_EPS, "sliding_window": 128, "rope_theta": 150000.0,
        "rope_scaling": {**_YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    },
    "hunyuan_v1_dense": _EPS,
    "hunyuan_v1_moe": _EPS,
    "hy_v3": {**_EPS, "rope_theta": 11158840.0, "router_scaling_factor": 2.826, "first_k_dense_replace": 1},
    "kimi_linear": {
        **_EPS, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "max_position_embeddings": 1048576,
    },
    "minimax_m2": {"rope_theta": 5000000.0},
    **{
        f"minimax_m3{part}": {"rope_theta": 5000000.0, "head_dim": 128} for part in ("", "_vl", "_vl_text")
    },
    "ministral3": {
        **_EPS, "head_dim": 128,
        "rope_scaling": {**_SCALED, "factor": 16.0, "original_max_position_embeddings": 16384}
        | {"rope_theta": 1000000.0},
    },
    "mistral": {"sliding_window": 4096},
    "mistral4": {
        "norm_topk_prob": True,
        "rope_scaling": {**_SCALED, "factor": 128.0, "original_max_position_embeddings": 8192}
        | {"rope_theta": 10000.0},
    },
    "mixtral": {**_EPS, "rope_theta": 1000000.0},
    "solar_open": {**_EPS, "head_dim": 128, "rope_theta": 1000000.0, "intermediate_size": 1},
    **{kind + part: {"rope_theta": theta} for kind, theta in _THETAS.items() for part in ("", "_text")},
}  # fmt: skip


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json (of the text model), with the defaults of its `model_type`."""
    own = dict(_BY_MODEL_TYPE.get(str(raw.get("model_type")), {}))
    if "rope_parameters" in raw:
        own.pop("rope_scaling", None)
    return {**own, **raw}
