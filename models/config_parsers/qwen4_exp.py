"""config.json of Qwen3.8-Flash-Next (`qwen4_exp`) -> ModelConfig. Imports no torch. The text model is in
`text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from moe_engine.models.config import GQAConfig, IndexerConfig, ModelConfig
from moe_engine.models.config_parsers.hybrid import parse_qwen3_5_moe
from moe_engine.models.config_sections.compressed import StreamsConfig
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.state import StateGroup, StatePart

_INDEXED, _FULL = "indexed_attention", "full_attention"
_SERVED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "indexer_kv_heads": 1,
    "mtp_use_dedicated_embeddings": False,
}
_SILU = ("silu", "swish")
_LARGEST_ID = 1 << 24
"""Ids of earlier tokens are kept as float32 numbers."""


def qwen4_exp_fields(fields: Fields) -> Fields:
    """The fields under the names of Qwen3.5."""
    kinds, raw = fields.raw.get("layer_types"), {"attn_output_gate": True, "hc_lowrank": 320} | fields.present()
    if isinstance(kinds, list):
        raw["layer_types"] = [_FULL if kind == _INDEXED else kind for kind in kinds]
    return Fields(raw, fields.source)


def parse_qwen4_exp(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3.8-Flash-Next: Qwen3.5-MoE's layers and tower with a selection of pools, gated streams and n-gram tables."""
    fields.check_served(_SERVED)
    _check_mtp(fields)
    config = parse_qwen3_5_moe(qwen4_exp_fields(fields), generation)
    delta, attention = config.delta, config.attention
    assert delta is not None and isinstance(attention, GQAConfig)
    if len(config.state_layers) == config.num_layers:
        fields.fail("layer_types", "has no layer with attention")
    gate = fields.text("output_gate_type", None) or "silu"
    if gate not in (*_SILU, "sigmoid"):
        fields.fail("output_gate_type", f"{gate!r} is not supported; supported: {', '.join(_SILU)}, sigmoid")
    count, engram = fields.integer("hc_count", 4, minimum=2), _engram(fields, config)
    return replace(
        config,
        delta=replace(delta, sigmoid=gate == "sigmoid"),
        attention=_with_indexer(fields, config, attention),
        streams=StreamsConfig(count, 0, 0.0, engram=engram, rank=fields.integer("hc_lowrank", 320)),
        state_groups=_state_groups(config, engram, count * config.hidden_size),
        raw=fields.raw,
    )


def _check_mtp(fields: Fields) -> None:
    """The MTP layer is served as published: attention over pools, by the model's last streams."""
    layer = fields.raw.get("mtp") or {}
    kinds, source = layer.get("layer_types") or [_FULL], layer.get("mtp_use_hidden_state_from_layer")
    if not set(kinds) <= {_FULL, _INDEXED} or source is not None:
        fields.fail("mtp", f"{layer!r} is not supported; supported: layer_types [{_FULL!r}], the last hidden state")


def _with_indexer(fields: Fields, config: ModelConfig, attention: GQAConfig) -> GQAConfig:
    budget, pool = fields.integer("indexer_budget"), fields.integer("indexer_compress_ratio", minimum=2)
    width = fields.integer("indexer_head_dim")
    if budget % pool:
        fields.fail("indexer_budget", f"{budget} is not a multiple of indexer_compress_ratio {pool}")
    if width < config.rope.width:
        fields.fail("indexer_head_dim", f"{width} is less than the {config.rope.width} rotated channels")
    indexer = IndexerConfig(fields.integer("indexer_n_heads"), budget, interleaved=False, pool=pool)
    return replace(attention, index_width=width, indexer=indexer)


def _engram(fields: Fields, config: ModelConfig) -> EngramConfig | None:
    """None: no layer has a table."""
    numbers = fields.raw.get("ple_layer_ids") or []
    states = config.state_layers
    if not isinstance(numbers, list) or not all(isinstance(i, int) and i - 1 in states for i in numbers):
        fields.fail("ple_layer_ids", f"must be numbers of linear attention layers, from 1 on: {numbers!r}")
    if not numbers:
        return None
    layers = tuple(sorted({i - 1 for i in numbers}))
    longest, heads = fields.integer("ngram_size", 3, minimum=2), fields.integer("heads_per_ngram", 8)
    size, columns = fields.integer("ple_embed_dim", None) or config.hidden_size, (longest - 1) * heads
    if size % columns:
        fields.fail("ple_embed_dim", f"{size} is not a multiple of the {columns} rows of a token")
    if not config.eos_token_ids or config.vocab_size >= _LARGEST_ID:
        fields.fail("eos_token_id", f"is missing, or vocab_size {config.vocab_size} is not below {_LARGEST_ID}")
    ends = fields.raw.get("eos_token_id")
    found = EngramConfig(
        layers=layers,
        rows=(0,) * len(layers),
        longest=longest,
        heads=heads,
        width=size // columns,
        first_prime=fields.integer("ngram_vocab_size_base", 20_000_000, minimum=2),
        num_ids=config.vocab_size,
        pad_id=ends[0] if isinstance(ends, list) and ends else fields.integer("eos_token_id", minimum=0),
        seed=fields.integer("seed", 1234, minimum=0),
        parts=fields.integer("split_ngram_parts", 512),
        taps=fields.integer("ple_conv_kernel_size", 4, minimum=2),
    )
    multiple = fields.integer("make_ngram_vocab_size_divisible_by", 128)
    return replace(found, rows=tuple(ceil(sum(primes) / multiple) * multiple for primes in found.primes))


def _state_groups(config: ModelConfig, engram: EngramConfig | None, wide: int) -> tuple[StateGroup, ...]:
    """The states of delta nets, with those of n-gram tables for the layers that have one."""
    assert config.delta is not None
    with_rows = () if engram is None else engram.layers
    plain = tuple(sorted(config.state_layers - set(with_rows)))
    groups = list(config.delta.state_groups(plain))
    if engram is not None:
        kept = StatePart((engram.reach, wide)), StatePart((engram.longest - 1, 1), "float32")
        groups.append(StateGroup(with_rows, (*config.delta.state_parts, *kept), stores_any=True))
    return tuple(groups)
