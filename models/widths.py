"""Shardable widths of a model, and a rank's attention heads, by its config. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.config_sections.state import StateGroup
from moe_engine.parallel.topology import ModelWidths

Attention = TypeVar("Attention", bound=MLAConfig | GQAConfig | CompressedConfig)


def widths_of(config: ModelConfig, redundant_experts: int = 0) -> ModelWidths:
    """Shardable widths. Copies of experts count. Any width can be split: a block-FP8 weight with split blocks is
    dequantized at load, others stay FP8 if the kernel supports it."""
    moe = config.moe if config.is_moe else None
    parts = [part for group in config.state_groups for part in group.parts]
    return ModelWidths(
        num_heads=math.gcd(*(kind.num_heads for kind in config.attentions)),
        num_kv_heads=tuple(sorted({kind.num_kv_heads for kind in config.attentions if isinstance(kind, GQAConfig)})),
        dense_width=config.intermediate_size if config.has_dense else 0,
        num_experts=moe.num_experts + redundant_experts if moe else 0,
        expert_width=moe.width if moe else 0,
        shared_width=moe.shared_width if moe else 0,
        latent_width=moe.latent if moe else 0,
        states=tuple(sorted({part.shape[part.sharded] for part in parts if part.sharded is not None})),
        output_groups=max(
            (kind.output_groups for kind in config.attentions if isinstance(kind, CompressedConfig)), default=0
        ),
    )


def cut_heads(attention: Attention, attn_tp_size: int) -> Attention:
    """The attention of one rank: its heads, and for GQA its cached KV heads (each on at least one rank)."""
    if attn_tp_size == 1:
        return attention
    changed: dict[str, Any] = {"num_heads": attention.num_heads // attn_tp_size}
    if isinstance(attention, GQAConfig):
        changed["num_kv_heads"] = max(1, attention.num_kv_heads // attn_tp_size)
    if isinstance(attention, CompressedConfig):
        changed["output_groups"] = max(1, attention.output_groups // attn_tp_size)
    found: Attention = dataclasses.replace(attention, **changed)
    return found


def local_heads(config: ModelConfig, attn_tp_size: int) -> ModelConfig:
    """The config with one rank's attention, and its part of the states of requests."""
    if attn_tp_size == 1:
        return config
    if (key := ("heads", attn_tp_size)) not in config.known_sizes:
        config.known_sizes[key] = _local_heads(config, attn_tp_size)
    found: ModelConfig = config.known_sizes[key]
    return found


def _local_heads(config: ModelConfig, attn_tp_size: int) -> ModelConfig:
    attention = config.attention
    states = tuple(_cut_states(group, attn_tp_size) for group in config.state_groups)
    other = config.other_layers
    if other is not None:
        other = dataclasses.replace(other, attention=cut_heads(other.attention, attn_tp_size))
    found = dataclasses.replace(config, other_layers=other, state_groups=states)
    return dataclasses.replace(found, attention=cut_heads(attention, attn_tp_size))


def _cut_states(group: StateGroup, attn_tp_size: int) -> StateGroup:
    parts = (
        part if part.sharded is None else dataclasses.replace(part, shape=_cut(part.shape, part.sharded, attn_tp_size))
        for part in group.parts
    )
    return dataclasses.replace(group, parts=tuple(parts))


def _cut(shape: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
