"""The minimum bytes read by a decode step of a model, and the time this takes.

Legend: B requests, S tokens before each, E experts, K experts per token.
"""

from __future__ import annotations

from moe_engine.kernels.experts.shapes import ExpertModel, ExpertShape
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.sizes import weight_bytes


def decode_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Weights once (only experts hit by B independent choices of K, and B rows of the embedding), and the KV of B
    requests with S tokens each, without activations."""
    read = weight_bytes(config, 2, format=config.weight_format) - 4 * config.context_length * config.rope.width
    read -= 2 * config.hidden_size * max(0, config.vocab_size - batch) * (not config.tie_word_embeddings)
    attention = config.attention
    if isinstance(attention, MLAConfig):  # both forms of kv_b are in memory, a decode reads one
        per_head = attention.qk_nope_head_dim + attention.v_head_dim
        read -= 2 * config.num_layers * attention.num_heads * per_head * attention.kv_lora_rank
    if config.moe is not None:
        moe = config.moe
        fp8 = bool(config.weight_format.name)
        model = ExpertModel("", moe.num_experts, moe.top_k, config.hidden_size, moe.width, fp8)
        hit = ExpertShape(model, batch, moe.num_experts).experts_hit
        expert = 3 * config.hidden_size * moe.width
        expert_bytes = expert + 4 * expert // 128**2 if fp8 else 2 * expert
        read -= round(sum(config.moe_layers) * (moe.num_experts - hit) * expert_bytes)
    return read + batch * context * config.kv_bytes_per_token("bfloat16")
