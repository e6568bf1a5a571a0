"""Tensors of layers with a state: gated delta nets, Kimi Delta Attention, Mamba2, lightning attention and short
convolutions. Imports no torch.

Names are relative to the layer; see `tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.config_sections.state import DeltaConfig, ShortConvConfig
from moe_engine.models.tensors.spec import Kind, TensorSpec, linear, norm


def state_tensors(own: DeltaConfig | ShortConvConfig, hidden: int) -> Iterator[TensorSpec]:
    """All tensors of a layer's block, with its name."""
    found = _short_conv(own, hidden) if isinstance(own, ShortConvConfig) else _delta_tensors(own, hidden)
    yield from (spec.within(own.block) for spec in found)


def _delta_tensors(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    if d.additive:
        return (_mamba if d.taps else _lightning if d.rope is None else _rotated_lightning)(d, hidden)
    return (_channel_delta if d.by_channel else _delta)(d, hidden)


def _short_conv(c: ShortConvConfig, hidden: int) -> Iterator[TensorSpec]:
    """The input projection has the rows of the first gates, of the second ones and of the values."""
    yield from linear("in_proj", 3 * c.width, hidden)
    yield TensorSpec("conv.weight", (c.width, 1, c.taps), Kind.WIDE)
    yield from linear("out_proj", hidden, c.width)


def _delta(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    keys, values = d.key_heads * d.key, d.value_heads * d.value
    joined = (("qkvz", 2 * (keys + values)), ("ba", 2 * d.value_heads))
    apart = (("qkv", 2 * keys + values), ("z", values), ("b", d.value_heads), ("a", d.value_heads))
    for name, rows in joined if d.joined else apart:
        yield from linear(f"in_proj_{name}", rows, hidden)
    yield TensorSpec("conv1d.weight", (2 * keys + values, 1, d.taps), Kind.WIDE)
    yield TensorSpec("A_log", d.a_log_shape, Kind.WIDE)
    yield TensorSpec("dt_bias", (d.value_heads,), Kind.WIDE)
    yield norm("norm", d.value)
    yield from linear("out_proj", hidden, values)


def _channel_delta(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    """Kimi Delta Attention: q, k and v have projections and convolutions of their own."""
    width = d.key_heads * d.key
    for name in "qkv":
        yield from linear(f"{name}_proj", width, hidden)
        yield TensorSpec(f"{name}_conv1d.weight", (width, 1, d.taps), Kind.WIDE)
    for name in ("f", "g"):
        if name in d.low_rank:
            yield from linear(f"{name}_a_proj", d.key, hidden)
            yield from linear(f"{name}_b_proj", width, d.key)
        else:
            yield from linear(f"{name}_proj", width, hidden)
    yield from linear("b_proj", d.key_heads, hidden)
    yield TensorSpec("A_log", d.a_log_shape, Kind.WIDE)
    yield TensorSpec("dt_bias", (width,), Kind.WIDE)
    yield norm("o_norm", d.value)
    yield from linear("o_proj", hidden, width)


def _mamba(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    """Mamba2: the input projection has the rows of z, x, B, C and step widths, the convolution those of x, B and C."""
    groups, values = d.key_heads * d.key, d.value_heads * d.value
    yield from linear("in_proj", 2 * (groups + values) + d.value_heads, hidden)
    yield TensorSpec("conv1d.weight", (2 * groups + values, 1, d.taps), Kind.WIDE)
    if d.conv_bias:
        yield TensorSpec("conv1d.bias", (2 * groups + values,), Kind.WIDE)
    for name in ("A_log", "dt_bias", "D"):
        yield TensorSpec(name, (d.value_heads,), Kind.WIDE)
    yield norm("norm", values)
    yield from linear("out_proj", hidden, values)


def _lightning(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    """The input projection has the rows of q, k and v head after head."""
    width = d.value_heads * d.value
    yield from linear("qkv_proj", 3 * width, hidden)
    yield from linear("output_gate", width, hidden)
    yield norm("norm", width)
    yield from linear("out_proj", hidden, width)


def _rotated_lightning(d: DeltaConfig, hidden: int) -> Iterator[TensorSpec]:
    """The input projection has the rows of q, then those of k and of v."""
    width = d.value_heads * d.value
    yield from linear("query_key_value", 3 * width, hidden)
    yield from linear("g_proj", width, hidden)
    yield norm("query_layernorm", d.key)
    yield norm("key_layernorm", d.key)
    yield norm("g_norm", width)
    yield from linear("o_proj", hidden, width)
