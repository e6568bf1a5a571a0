"""Tensors of an MLA layer and of its indexer. Imports no torch.

Legend: D hidden, H heads, N qk_nope, R rotary, V v_head, C kv_lora_rank, Q q_lora_rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.config_sections.mla import MLAConfig
from moe_engine.models.tensors.spec import Kind, TensorSpec, linear, norm


def mla_tensors(config: MLAConfig, hidden: int, layer: int | None) -> Iterator[TensorSpec]:
    """Names without ``self_attn.``. layer: None: one like most."""
    a, query = config.of_layer(layer), config.num_heads * config.qk_head_dim
    if a.q_lora_rank is None:
        yield from linear("q_proj", query, hidden)
    else:
        yield from linear("q_a_proj", a.q_lora_rank, hidden, a.bias)
        yield norm("q_a_layernorm", a.q_lora_rank)
        yield from linear("q_b_proj", query, a.q_lora_rank)
    if a.head_factors:
        yield from _factors(a.num_heads)
    if layer is None or a.source_of(layer) == layer:
        yield from linear("kv_a_proj_with_mqa", a.stored_width(layer), hidden, a.bias)
        yield norm("kv_a_layernorm", a.kv_lora_rank)
    yield from linear("kv_b_proj", a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
    yield from linear("o_proj", hidden, a.num_heads * a.v_head_dim, a.bias)
    if a.gate_width:
        yield from linear("g_proj", a.num_heads * a.gate_width, hidden)


def indexer_tensors(a: MLAConfig, hidden: int) -> Iterator[TensorSpec]:
    """Names without ``self_attn.indexer.``."""
    assert a.indexer is not None
    heads, width = a.indexer.num_heads, a.index_width
    if a.indexer.from_input:
        yield from (TensorSpec(f"q_input_norm.{part}", (hidden,), Kind.WIDE) for part in ("weight", "bias"))
        yield from linear("wq_b", heads * width, hidden)
    else:
        assert a.q_lora_rank is not None
        yield from linear("wq_b", heads * width, a.q_lora_rank)
    if a.head_factors:
        yield from _factors(heads)
    yield from linear("wk", width, hidden)
    yield norm("k_norm", width)
    yield TensorSpec("k_norm.bias", (width,), Kind.WIDE)
    yield TensorSpec("weights_proj.weight", (heads, hidden), Kind.WIDE)
    if a.indexer.pool > 1:
        yield TensorSpec("index_kpool_compress_gate", (width, hidden), Kind.PLAIN)
        yield TensorSpec("index_kpool_compress_ape", (a.indexer.pool, width), Kind.WIDE)


def _factors(heads: int) -> Iterator[TensorSpec]:
    """The factors of heads, `MLAConfig.head_factors`."""
    for name in ("scale", "bias"):
        yield TensorSpec(f"softmax_scaling.{name}", (heads,), Kind.WIDE)
