"""A rank's part of a model, by its config: its attention heads, and its share of the tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_engine.models.config import ModelConfig
from moe_engine.models.widths import Attention, cut_heads, local_heads
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dispatch.protocol import DispatchShape


def local_attention(attention: Attention, parallel: ParallelContext) -> Attention:
    """See `widths.cut_heads`."""
    return cut_heads(attention, parallel.attn_tp_size)


def local_config(config: ModelConfig, parallel: ParallelContext) -> ModelConfig:
    """The config with this rank's attention: the sizes of its KV pool and attention backend."""
    return local_heads(config, parallel.attn_tp_size)


def dispatch_shape(
    config: ModelConfig, parallel: ParallelContext, dtype: torch.dtype, max_tokens: int
) -> DispatchShape:
    """Sizes of the dispatcher of the model's MoE layers; see `parallel.context.with_dispatcher`.

    Args:
        max_tokens: max tokens of an attention group in a step, divided among its ranks.
    """
    assert config.moe is not None
    per_rank = -(-max_tokens // parallel.attn_tp_size)
    return DispatchShape(
        num_experts=config.moe.num_experts + parallel.redundant_experts,
        num_ranks=parallel.ep_size,
        top_k=config.moe.top_k,
        hidden=config.routed_size,
        max_tokens=per_rank,
        dtype=dtype,
        width=config.moe.width,
    )


def draft_dispatch_shape(config: ModelConfig, shape: DispatchShape) -> DispatchShape | None:
    """`shape`, of the model's MoE layers, for draft layers; None: they have as many experts."""
    own = config.moe_of(config.num_layers)
    if own is None or own == config.moe:
        return None
    return replace(shape, num_experts=own.num_experts, top_k=own.top_k)
