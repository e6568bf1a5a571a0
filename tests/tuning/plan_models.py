"""config.json files for the planner, with random sizes or those of released models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.models.published import V3


def small_deepseek() -> dict[str, Any]:
    """Random sizes of the same family, without MTP layers and FP8."""
    heads = random.choice([4, 8, 16])
    return {
        name: value for name, value in V3.items() if name not in ("quantization_config", "num_nextn_predict_layers")
    } | {
        "hidden_size": 128 * random.randint(2, 8), "num_hidden_layers": (layers := random.randint(2, 9)),
        "first_k_dense_replace": random.randint(0, layers - 1), "n_routed_experts": random.choice([16, 32, 64]),
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": random.randint(1, 8),
        "n_shared_experts": random.randint(1, 2), "moe_intermediate_size": 64 * random.randint(1, 8),
        "intermediate_size": 64 * random.randint(4, 16), "num_attention_heads": heads, "num_key_value_heads": heads,
        "q_lora_rank": random.choice([None, 192]), "vocab_size": random.randint(500, 5000),
    }  # fmt: skip


def small_grouped() -> dict[str, Any]:
    """Random sizes of a Qwen3-MoE model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64 * random.randint(2, 8),
        "num_hidden_layers": random.randint(1, 6), "num_experts": random.choice([8, 16]),
        "num_experts_per_tok": random.randint(1, 4), "moe_intermediate_size": 32 * random.randint(1, 8),
        "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": random.choice([1, 2, 8]),
        "head_dim": random.choice([32, 64]), "vocab_size": random.randint(500, 5000), "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 10000, "norm_topk_prob": True, "eos_token_id": 1,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> str:
    """The path of the model's folder, with only config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
