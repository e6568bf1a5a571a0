"""What a rank of many holds of a model, by its config: its attention heads, and the widths that can be cut."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.topology import ModelWidths

Attention = TypeVar("Attention", MLAConfig, GQAConfig)


def local_attention(attention: Attention, parallel: ParallelContext) -> Attention:
    """The attention of one rank: its heads, and for GQA the KV heads that it caches (each at least on one rank)."""
    size = parallel.attn_tp_size
    if size == 1:
        return attention
    if isinstance(attention, MLAConfig):
        return dataclasses.replace(attention, num_heads=attention.num_heads // size)
    num_kv_heads = max(1, attention.num_kv_heads // size)
    return dataclasses.replace(attention, num_heads=attention.num_heads // size, num_kv_heads=num_kv_heads)


def local_config(config: ModelConfig, parallel: ParallelContext) -> ModelConfig:
    """The config with this rank's attention: what a KV pool and an attention backend are made for."""
    if parallel.attn_tp_size == 1:
        return config
    attention = config.attention
    if isinstance(attention, MLAConfig):
        return dataclasses.replace(config, attention=local_attention(attention, parallel))
    return dataclasses.replace(config, attention=local_attention(attention, parallel))


def widths_of(config: ModelConfig) -> ModelWidths:
    """What can be cut. Weights are dequantised on load, so that any width can be parted."""
    attention, moe = config.attention, config.moe if config.is_moe else None
    return ModelWidths(
        num_heads=attention.num_heads,
        num_kv_heads=0 if isinstance(attention, MLAConfig) else attention.num_kv_heads,
        latent_kv=isinstance(attention, MLAConfig),
        dense_width=0 if all(config.moe_layers) else config.intermediate_size,
        num_experts=moe.num_experts if moe else 0,
        expert_width=moe.width if moe else 0,
        shared_width=moe.shared_width if moe else 0,
    )


def dispatch_shape(
    config: ModelConfig, parallel: ParallelContext, dtype: torch.dtype, max_tokens: int
) -> DispatchShape:
    """What the dispatcher of the model's MoE layers is made for; see `parallel.context.with_dispatcher`.

    Args:
        max_tokens: most tokens of an attention group in a step; a rank brings its share of them.
    """
    assert config.moe is not None
    per_rank = -(-max_tokens // parallel.attn_tp_size)
    return DispatchShape(
        num_experts=config.moe.num_experts,
        num_ranks=parallel.ep_size,
        top_k=config.moe.top_k,
        hidden=config.hidden_size,
        max_tokens=per_rank,
        dtype=dtype,
    )
