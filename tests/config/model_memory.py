"""The table of memory per rank in docs/models.md. `python -m tests.config.model_memory` prints it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.hardware.table import find_gpu
from tests.models.published import LLAMA, V2_LITE
from tests.models.published import YARN_V3 as V3

GIB = 1 << 30
V2 = V2_LITE | {
    "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
    "rope_scaling": V3["rope_scaling"],
}  # fmt: skip
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768,
    "max_position_embeddings": 32768, "sliding_window": None, "eos_token_id": 2,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 32768, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
GROUPS = {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8, "moe_a2a_backend": "all_to_all"}
MODELS: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("DeepSeek V3, R1, V3.1, FP8", "`--tp 8`", V3, {"tp_size": 8}),
    ("the same", "`--tp 8 --attn-dp-size 8 --ep 8 --moe-a2a-backend all_to_all`", V3, GROUPS),
    ("DeepSeek V2, bf16", "`--tp 8`", V2, {"tp_size": 8}),
    ("DeepSeek V2-Lite, bf16", "1", V2_LITE, {}),
    ("Llama 3.1 8B", "1", LLAMA, {}),
    ("Llama 3.1 70B", "`--tp 4`", LLAMA | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    }, {"tp_size": 4}),
    ("Mistral 7B v0.3", "1", MISTRAL, {}),
    ("Mixtral 8x7B", "`--tp 2`", MIXTRAL, {"tp_size": 2}),
    ("Qwen2.5 7B", "1", QWEN2, {}),
    ("Qwen3 8B", "1", QWEN3, {}),
    ("Qwen3 30B-A3B", "1", QWEN3_MOE, {}),
)  # fmt: skip


def launches() -> Iterator[tuple[str, str, ResolvedConfig]]:
    """(model, ranks, configuration) of each row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        for name, ranks, config, flags in MODELS:
            file.write_text(json.dumps(config))
            args = EngineArgs.from_kwargs(load_format="dummy", **flags)
            model = load_model_config(Path(folder))
            yield name, ranks, resolve(args, model, find_gpu("h200").machine(), model_path=folder)


def rows() -> Iterator[str]:
    for name, ranks, config in launches():
        ledger, groups = config.ledger, config.parallel.topology.attn_dp_size
        tokens = f"{ledger.num_tokens / 1000:,.0f} thousand" + f" in each of {groups} groups" * (groups > 1)
        yield f"| {name} | {ranks} | {ledger.weight_bytes / GIB:.1f} | {ledger.bytes_per_token:,} | {tokens} |"


if __name__ == "__main__":
    print("\n".join(rows()))
