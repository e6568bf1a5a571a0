"""Tensors of residual streams with gates of low rank, and of rows of n-grams that are added to them
(Qwen3.8-Flash-Next). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.models.config_sections.compressed import StreamsConfig
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.tensors.spec import Kind, TensorSpec, linear, norm

STREAM_GATES = {
    "input_layernorm": "attn_hyper_connection", "post_attention_layernorm": "mlp_hyper_connection",
    "norm": "hyper_connection_mixer",
}  # fmt: skip
"""Norms, and the weights in their place with streams of `StreamsConfig.rank`."""


def gate_tensors(streams: StreamsConfig, hidden: int, name: str) -> Iterator[TensorSpec]:
    """The gates in the place of the norm `name`; without those of a result for the last one, the head's."""
    wide, gates = streams.count * hidden, STREAM_GATES[name]
    yield norm(f"{gates}.hc_norm", wide)
    yield from linear(f"{gates}.input_mix_weight_down", streams.rank, wide)
    yield from linear(f"{gates}.input_mix_weight_up", wide, streams.rank)
    if name != "norm":
        yield from linear(f"{gates}.block_inject_weight", streams.count, wide)


def ngram_tensors(engram: EngramConfig, count: int, hidden: int) -> Iterator[TensorSpec]:
    """Tensors that belong to a table of n-grams; count: streams."""
    rows, wide = engram.columns * engram.width, count * hidden
    yield from linear("key_proj", wide, rows)
    yield from linear("value_proj", hidden, rows)
    yield from (norm(name, wide) for name in ("norm_key", "norm_query", "norm_conv"))
    yield TensorSpec("conv1d.weight", (wide, 1, engram.taps), Kind.WIDE)
