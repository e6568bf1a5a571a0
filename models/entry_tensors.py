"""Tensors of attention to windows and compressed entries (DeepSeek V4, V4.1). Imports no torch.

Legend: see `tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.compressed_config import CompressedConfig, SharedEntriesConfig
from moe_engine.models.tensor_spec import Kind, TensorSpec, linear, norm


def compressed_tensors(a: CompressedConfig, hidden: int, layer: int | None) -> Iterator[TensorSpec]:
    """Projections, norms and entries of an attention layer. layer: None: of an MTP layer."""
    query = a.num_heads * a.head_dim
    yield from linear("q_a_proj", a.q_lora_rank, hidden)
    yield norm("q_a_layernorm", a.q_lora_rank)
    yield from linear("q_b_proj", query, a.q_lora_rank)
    yield from linear("kv_proj", a.head_dim, hidden)
    yield norm("kv_layernorm", a.head_dim)
    yield TensorSpec("sinks", (a.num_heads,), Kind.WIDE)
    yield from linear("o_a_proj", a.output_groups * a.output_rank, query // a.output_groups)
    yield from linear("o_b_proj", hidden, a.output_groups * a.output_rank)
    if layer is None or not a.rate(layer):
        return
    if isinstance(a, SharedEntriesConfig):
        yield from _shared_entries(a, hidden, layer)
        return
    prefixes = ("compressor", "indexer.compressor")
    for prefix, width in zip(prefixes, a.entry_widths(layer)):
        series = 2 * width if a.selects(layer) else width
        yield from linear(f"{prefix}.kv_proj", series, hidden)
        yield from linear(f"{prefix}.gate_proj", series, hidden)
        yield TensorSpec(f"{prefix}.position_bias", (a.rate(layer), series), Kind.WIDE)
        yield norm(f"{prefix}.norm", width)
    if a.selects(layer):
        yield from linear("indexer.q_b_proj", a.index_heads * a.index_width, a.q_lora_rank)
        yield TensorSpec("indexer.weights_proj.weight", (a.index_heads, hidden), Kind.WIDE)


def _shared_entries(a: SharedEntriesConfig, hidden: int, layer: int) -> Iterator[TensorSpec]:
    if a.writes(layer):
        for name in ("kv_proj", "gate_proj") if a.rate(layer) > 1 else ("kv_proj",):
            yield TensorSpec(f"compressor.{name}.weight", (a.head_dim, hidden))
        yield norm("compressor.norm", a.head_dim)
        yield TensorSpec("indexer.wk.weight", (a.index_width, a.head_dim))
        yield norm("indexer.k_norm", a.index_width)
    if a.selects(layer):
        yield from linear("indexer.q_b_proj", a.index_heads * a.index_width, a.q_lora_rank)
        yield TensorSpec("indexer.weights_proj.weight", (a.index_heads, hidden), Kind.WIDE)
