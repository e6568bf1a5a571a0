"""Parameter counts and byte sums of a model, for the memory ledger. Imports no torch.

Legend: D hidden, H heads, N qk_nope, R rotary, V v_head, C kv_lora_rank, Q q_lora_rank, I widths, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig

MAX_EXPANDED_TOKENS = 16384
"""Context tokens whose keys and values the MLA layer expands at once (its constructor's default)."""

MAX_ABSORBED_TOKENS = 1024
"""Query tokens of one piece when a long context is read in the absorbed form instead."""


@dataclass(frozen=True)
class LayerCount:
    """Elements of a layer: those in the activation dtype, those in float32, and MLA's second copy of kv_b."""

    plain: int
    wide: int
    second_copy: int = 0


def attention_count(config: ModelConfig) -> LayerCount:
    """Projections, biases and inner norms of one attention layer."""
    attention, hidden = config.attention, config.hidden_size
    if attention.kind == "mla":
        return _mla_count(attention, hidden)  # type: ignore[arg-type]
    return _gqa_count(attention, hidden)  # type: ignore[arg-type]


def _mla_count(a: MLAConfig, hidden: int) -> LayerCount:
    query = a.num_heads * a.qk_head_dim
    kv_b = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) * a.kv_lora_rank
    plain = hidden * a.cache_width + kv_b + a.num_heads * a.v_head_dim * hidden
    plain += ((a.q_lora_rank or 0) + a.cache_width + hidden) * a.bias
    if a.q_lora_rank is None:
        return LayerCount(plain + hidden * query, a.kv_lora_rank, kv_b)
    plain += hidden * a.q_lora_rank + a.q_lora_rank * query
    return LayerCount(plain, a.kv_lora_rank + a.q_lora_rank, kv_b)


def _gqa_count(a: GQAConfig, hidden: int) -> LayerCount:
    query, key = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    biases = (query + 2 * key) * a.qkv_bias + hidden * a.o_bias
    return LayerCount(hidden * (2 * query + 2 * key) + biases, 2 * a.head_dim * a.qk_norm)


def mlp_count(config: ModelConfig, is_moe: bool, experts: int | None = None) -> LayerCount:
    """The feed-forward part of a layer; `experts` counts only so many of the routed experts."""
    hidden, moe = config.hidden_size, config.moe
    if not is_moe or moe is None:
        biases = (2 * config.intermediate_size + hidden) * config.mlp_bias
        return LayerCount(3 * hidden * config.intermediate_size + biases, 0)
    routed = moe.num_experts if experts is None else experts
    return LayerCount(
        3 * hidden * (moe.width * routed + moe.shared_width), moe.num_experts * hidden + moe.num_experts * moe.has_bias
    )


def _layers(config: ModelConfig, include_mtp: bool, experts: int | None = None) -> list[LayerCount]:
    """Attention, feed-forward and norms of every layer, MTP's included when asked."""
    hidden = config.hidden_size
    counts: list[LayerCount] = []
    extra = config.num_nextn_predict_layers if include_mtp else 0
    for is_moe in (*config.moe_layers, *[config.is_moe] * extra):
        counts += [attention_count(config), mlp_count(config, is_moe, experts), LayerCount(0, 2 * hidden)]
    counts += [LayerCount(2 * hidden * hidden, 3 * hidden)] * extra  # eh_proj and three norms
    return counts


def num_parameters(config: ModelConfig, include_mtp: bool = False) -> int:
    """See `ModelConfig.num_parameters`."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return tables + config.hidden_size + sum(c.plain + c.wide for c in _layers(config, include_mtp))


def num_active_parameters(config: ModelConfig) -> int:
    """See `ModelConfig.num_active_parameters`."""
    top_k = config.moe.top_k if config.moe is not None else None
    tables = (config.vocab_size + 1) * config.hidden_size
    return tables + sum(c.plain + c.wide for c in _layers(config, False, top_k))


def weight_bytes(config: ModelConfig, dtype_bytes: int, include_mtp: bool = False) -> int:
    """See `ModelConfig.weight_bytes`. Includes the rotary table (float32, one for all layers)."""
    layers = _layers(config, include_mtp)
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    plain = tables + sum(c.plain + c.second_copy for c in layers)
    wide = config.hidden_size + sum(c.wide for c in layers)
    rotary = config.context_length * config.rope.width
    return plain * dtype_bytes + 4 * (wide + rotary)


def step_activation_bytes(
    config: ModelConfig, num_tokens: int, dtype_bytes: int, num_logits: int = 0, expanded_tokens: int | None = None
) -> int:
    """See `ModelConfig.largest_step_activation_bytes`."""
    stream = 3 * num_tokens * config.hidden_size * dtype_bytes  # residual, normed input, output of the part
    largest = max(
        _attention_bytes(config, num_tokens, dtype_bytes, expanded_tokens), _mlp_bytes(config, num_tokens, dtype_bytes)
    )
    return stream + largest + num_logits * config.vocab_size * (4 + dtype_bytes)


def _attention_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int, expanded_tokens: int | None) -> int:
    a = config.attention
    if a.kind == "gqa":
        width = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim  # type: ignore[union-attr]
        return num_tokens * width * dtype_bytes
    return _mla_bytes(a, num_tokens, dtype_bytes, expanded_tokens)  # type: ignore[arg-type]


def _mla_bytes(a: MLAConfig, num_tokens: int, dtype_bytes: int, expanded_tokens: int | None) -> int:
    limit = MAX_EXPANDED_TOKENS if expanded_tokens is None else expanded_tokens
    down = (a.q_lora_rank or 0) * 2 + a.cache_width
    query = a.num_heads * (a.qk_head_dim + a.v_head_dim)
    context = a.cache_width + a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    absorbed = min(num_tokens, MAX_ABSORBED_TOKENS) * a.num_heads * (a.cache_width + a.kv_lora_rank)
    return (num_tokens * (down + query) + max(limit * context, absorbed)) * dtype_bytes


def _mlp_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
    dense = 3 * config.intermediate_size
    moe = config.moe
    if moe is None:
        return num_tokens * dense * dtype_bytes
    routed = moe.top_k * (3 * config.hidden_size + 3 * moe.width)  # rows in, products, rows out (float32 sums aside)
    combine = 4 * moe.top_k * config.hidden_size + 8 * moe.num_experts
    return num_tokens * (max(dense, routed + 3 * moe.shared_width) * dtype_bytes + combine)
