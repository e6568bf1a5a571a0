"""Grouped-query attention of the dense families: optional biases, q/k norms and partial rotation.

Legend: T tokens, D hidden, H query heads, G KV heads, Dh width of a key, V width of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.decoder.grouped import FusedGQA, GQALayer
from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.kernels.queries import PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import CacheGroup, GQAConfig, ModelConfig
from moe_engine.models.layers.attention.projection_norm import ProjectionNorms
from moe_engine.models.layers.attention.rotated_norm import HeadWeights, UnweightedNorm
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.sharding import local_attention
from moe_engine.models.tensors.model import sinks_name
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share, heads_share

QueryPart = tuple[slice | Tensor, PagedQueries, Any]
"""Query tokens of a step, their queries and the plan of these."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Inputs of the layers of one cache group in a step: the non-empty groups of queries with their tokens, their plan,
    and the slots [T] to which the tokens' keys and values are written."""

    queries: list[tuple[slice, PagedQueries]]
    plan: Any
    slots: Tensor
    chunks: Sequence[Any] = ()
    """The queries as layers see them that attend to selected blocks (`BlockChunk`) or pools (`AttentionChunk`)."""
    parts: Sequence[QueryPart] = ()
    """The queries in parts, if they are not causal (`image_spans`)."""


class ProjectedParts(NamedTuple):
    """The parts of the projection. `heads` [T, H+G, Dh]: q and k together; with an output gate all heads of the
    projection."""

    q: Tensor  # [T, H, Dh]
    k: Tensor  # [T, G, Dh]
    v: Tensor  # [T, G, V]
    heads: Tensor
    bias: Tensor | None = None  # [H Dh + G Dh + G V], not yet added


Groups = Sequence[GroupInputs]
"""By cache group, see `ModelConfig.cache_groups`."""


class GQAttention:
    """hidden [T, D] -> [T, D]. q, k and v come out of one product; q and k are rotated in place in one call.

    On many ranks H and G count this rank's heads, and the result is their partial sum.

    Args:
        layer_name: prefix of the layer's tensors; default ``model.layers.{layer_index}``.
        input_size: width of the input, if it is not that of the hidden states.
        number: of the layer in `config`, if it is not `layer_index`, its cache's.
    """

    fused = None
    """The layer in one call, for draft chains: no kernel has it."""
    inner_norms: Sequence[RMSNorm] = ()
    """Norms whose results linear layers read: none."""
    in_stack: FusedGQA | None = None
    """The layer in a call of all layers, if the kernels support it."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        rotary: RotaryTable,
        layer_name: str | None = None,
        input_size: int | None = None,
        number: int | None = None,
    ) -> None:
        number = layer_index if number is None else number
        whole = config.attention_of(number)
        assert isinstance(whole, GQAConfig)
        gqa, rope = local_attention(whole, parallel), config.rope_of(number)
        self._gqa, self._layer_index, self._rotary = gqa, layer_index, rotary
        self._ops = backends.ops
        self._backend: GQABackend = backends.attention  # type: ignore[assignment]
        self._group = _group_of(config, number)
        self._all_groups = config.cache_groups
        self._scale = gqa.head_dim**-0.5 * rope.softmax_factor
        prefix = f"{layer_name or f'model.layers.{layer_index}'}.self_attn"
        query, key = whole.num_heads * gqa.head_dim, whole.num_kv_heads * gqa.head_dim
        value, mixed = whole.num_kv_heads * gqa.value_width, whole.num_heads * gqa.value_width
        gated = 2 * query if gqa.output_gate else query
        share = Share.of(parallel.attn_tp)
        kv_share = heads_share(share, whole.num_kv_heads)
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        used = 2 if gqa.shared_values else 3
        self._qkv = load_linear(
            backends.linear, reader, names[:used], [gated, key, value][:used], input_size or config.hidden_size,
            gqa.qkv_bias, [share, kv_share, kv_share][:used],
        )  # fmt: skip
        o_proj, hidden = [f"{prefix}.o_proj"], [config.hidden_size]
        self._o = load_linear(backends.linear, reader, o_proj, hidden, mixed, gqa.o_bias, in_share=share)
        self._paged: Callable[..., Tensor] = self._backend.paged
        self._sinks: Tensor | None = None
        if gqa.sinks:
            name, heads = f"{prefix}.{sinks_name(config)}", whole.num_heads
            self._sinks = reader.tensor(name, (heads,), Cut(share.cut(heads)), dtype=torch.float32)
            supported = self._backend.capabilities.sinks
            assert supported is not None
            self._paged = partial(_with_last, supported, (self._sinks,))
        if gqa.score_cap:
            capped = self._backend.capabilities.capped
            assert capped is not None
            self._paged = partial(_with_last, capped, (self._sinks, gqa.score_cap))
        self._norm_eps = gqa.qk_eps or config.norm_eps
        self._load_norms(config, reader, prefix, (query, key), (share, kv_share), parallel)
        self._grouped_rows = None if rope.axes else backends.ops.capabilities.grouped_rows
        changed = self._both_norms is not None or rotary.query_scale is not None or gqa.output_gate
        changed |= gqa.value_scale != 1.0 or gqa.value_norm
        self._adds_bias = self._grouped_rows is not None and not changed
        """Whether the launch that writes cache rows may add the bias of the projection."""
        decoder = self._backend.capabilities.decoder
        scaled = self._head_weights is not None or rotary.query_scale is not None
        scaled |= gqa.value_scale != 1.0 or gqa.value_width != gqa.head_dim or gqa.value_norm or gqa.score_cap != 0.0
        plain = type(self) is GQAttention and self._both_norms is None and not rope.axes and not scaled
        if decoder is not None and plain:
            norms = None if self._q_norm is None or self._k_norm is None else (self._q_norm.weight, self._k_norm.weight)
            self.in_stack = decoder.fuse_gqa(
                GQALayer(
                    self._qkv.weight, self._o.weight, norms, self._sinks, gqa.num_heads, gqa.num_kv_heads, rotary,
                    self._norm_eps, self._scale,
                )
            )  # fmt: skip

    def _load_norms(
        self, config: ModelConfig, reader: WeightSource, prefix: str, widths: tuple[int, int],
        shares: tuple[Share, Share], parallel: ParallelContext,
    ) -> None:  # fmt: skip
        """Norms of q and k; widths and shares of their whole projections."""
        width = self._gqa.head_dim
        self._q_norm: RMSNorm | UnweightedNorm | None = None
        self._k_norm: RMSNorm | UnweightedNorm | None = None
        self._head_weights: HeadWeights | None = None
        self._both_norms: ProjectionNorms | None = None
        if self._gqa.qk_norm == "projection":
            self._both_norms = ProjectionNorms(
                self._ops, reader, prefix, widths, self._norm_eps, shares, parallel.attn_tp
            )
        elif self._gqa.qk_norm in ("rotated", "unweighted"):
            if self._gqa.qk_norm == "rotated":
                self._head_weights = HeadWeights(reader, prefix, width)
            self._q_norm = self._k_norm = UnweightedNorm(self._ops, width, self._norm_eps, reader.device)
        elif self._gqa.qk_norm:
            self._q_norm, self._k_norm = (
                RMSNorm(self._ops, reader, f"{prefix}.{name}", width, self._norm_eps, config.norm_plus)
                for name in ("q_norm", "k_norm")
            )
        self._v_norm: UnweightedNorm | None = None
        if self._gqa.value_norm:
            self._v_norm = UnweightedNorm(self._ops, self._gqa.value_width, self._norm_eps, reader.device)
        self._head_norms: HeadNorms | None = None
        if self._q_norm is not None and self._k_norm is not None:
            self._head_norms = HeadNorms(self._q_norm.weight, self._k_norm.weight, self._norm_eps)

    @property
    def first_product(self) -> Linear:
        """Reads the hidden states first."""
        return self._qkv

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._qkv.input_format

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        k_cache, v_cache = cache = self.cache_of(batch)
        groups = group_inputs(batch, self._all_groups, self._backend) if groups is None else groups
        q = self.before(hidden, batch.positions, groups[self._group].slots, cache)
        return self.after(self._attend(q, k_cache, v_cache, groups))

    # -- the layer split around attention; `before` and `after` take tensors only

    def before(self, hidden: Activation, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """hidden [T, D] -> rotated q [T, H, Dh]; writes the tokens' keys and values to the caches' slots."""
        if not self._adds_bias or cache[0].dtype != hidden.dtype:
            return self._rows(self._parts(self._qkv(hidden)), positions, slots, cache)
        projected, bias = self._qkv.split(hidden)
        return self._rows(self._parts(projected)._replace(bias=bias), positions, slots, cache)

    def _rows(self, parts: ProjectedParts, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """The result of `before` from the parts of the projection."""
        if self._rotary.query_scale is not None:
            parts.q.mul_(self._rotary.query_scale[positions][:, None, None])
        q = self._turn_and_write(parts, positions, slots, cache)
        return q if self._head_weights is None else self._head_weights.multiply(q)

    def _turn_and_write(
        self, parts: ProjectedParts, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        q, k, v, _, bias = parts
        if self._grouped_rows is None or cache[0].dtype != q.dtype:
            q, k = self._turned(parts, positions)
            self._ops.write_kv(k, v, slots, *cache)
            return q
        if self._both_norms is not None:
            q, k = self._norm_both(q, k)
        return self._grouped_rows(q, k, v, self._head_norms, positions, self._rotary, slots, *cache, bias)

    def remember(self, hidden: Activation, batch: ForwardBatch) -> None:
        """Writes the keys and values of `forward` without computing its result."""
        parts = self._parts(self._qkv(hidden))
        _, k = self._turned(parts, batch.positions)
        windows = None if self._all_groups[self._group].window is None else batch.windows
        slots = batch.slots if windows is None else windows.slots
        self._ops.write_kv(k, parts.v, slots, *self.cache_of(batch))

    def cache_of(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """This layer's caches, [num_slots, G, Dh] and [num_slots, G, V]; index keys may follow them."""
        keys, values, *_ = batch.kv[self._layer_index]
        return keys, values

    def slots_of(self, batch: ForwardBatch, groups: Groups) -> Tensor:
        """The slots [T] of the step's tokens in this layer's caches."""
        return groups[self._group].slots

    def attend(self, query: Tensor, batch: ForwardBatch, groups: Groups) -> Tensor:
        """[T, H, Dh] -> [T, H, V]."""
        k_cache, v_cache = self.cache_of(batch)
        return self._attend(query, k_cache, v_cache, groups)

    def after(self, mixed: Tensor) -> Tensor:
        """[T, H, V] -> [T, D]."""
        return self._o(mixed.flatten(1))

    # -- internals

    def _parts(self, projected: Tensor) -> ProjectedParts:
        gqa = self._gqa
        both = gqa.num_heads + gqa.num_kv_heads
        heads = projected[:, : both * gqa.head_dim].unflatten(1, (both, gqa.head_dim))
        v = heads[:, gqa.num_heads :]
        if not gqa.shared_values:
            v = projected[:, both * gqa.head_dim :].unflatten(1, (gqa.num_kv_heads, gqa.value_width))
        if gqa.value_scale != 1.0:
            v.mul_(gqa.value_scale)
        if self._v_norm is not None:
            v = self._v_norm(v)
        return ProjectedParts(heads[:, : gqa.num_heads], heads[:, gqa.num_heads :], v, heads)

    def _turned(self, parts: ProjectedParts, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k of the parts, normed and rotated; may overwrite them."""
        q, k, _, heads, _ = parts
        if self._both_norms is not None:
            q, k = self._norm_both(q, k)
        elif self._q_norm is None or self._k_norm is None:
            self._ops.rotate_leading(heads[:, : q.shape[1] + k.shape[1]], positions, self._rotary)
            return q, k
        else:
            q, k = self._q_norm(q), self._k_norm(k)
        self._ops.rotate_leading(q, positions, self._rotary)
        self._ops.rotate_leading(k, positions, self._rotary)
        return q, k

    def _norm_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, H, Dh] and k [T, G, Dh], normed over all their heads."""
        assert self._both_norms is not None
        new_q, new_k = self._both_norms(q.flatten(1), k.flatten(1))
        return new_q.view(q.shape), new_k.view(k.shape)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, groups: Groups) -> Tensor:
        """q [T, H, Dh] -> [T, H, V], the decode group, then the prefill group."""
        inputs, paged = groups[self._group], self._paged
        plan = inputs.plan
        if inputs.parts:
            out = q.new_empty(*q.shape[:2], self._gqa.value_width)
            for part, queries, own in inputs.parts:
                out[part] = paged(q[part], k_cache, v_cache, queries, self._scale, own)
            return out
        if len(inputs.queries) == 1:
            return paged(q, k_cache, v_cache, inputs.queries[0][1], self._scale, plan)
        out = q.new_empty(*q.shape[:2], self._gqa.value_width)
        for tokens, queries in inputs.queries:
            out[tokens] = paged(q[tokens], k_cache, v_cache, queries, self._scale, plan)
        return out


def _with_last(paged: Callable[..., Tensor], last: tuple[Any, ...], *args: Any) -> Tensor:
    return paged(*args, *last)


def _group_of(config: ModelConfig, layer_index: int) -> int:
    """The cache group of a layer: that of its window."""
    window = config.window_of(layer_index)
    return next(i for i, group in enumerate(config.cache_groups) if group.window == window)


def group_inputs(batch: ForwardBatch, groups: Sequence[CacheGroup], backend: GQABackend) -> Groups:
    """Inputs of all layers; host work once per step. A group with another window than the batch's queries is planned
    here, unless it was planned with the batch. If the KV of windows is bounded, the batch's queries have the table of
    the first group."""
    return [_inputs(batch, group, backend) for group in groups]


def _inputs(batch: ForwardBatch, group: CacheGroup, backend: GQABackend) -> GroupInputs:
    attention, plan = batch.attention, batch.attention_plan
    windows = None if group.window is None else batch.windows
    if group.window != attention.window and batch.other_groups is not None:
        attention, plan = batch.other_groups[group.window]
    elif group.window != attention.window:
        attention = attention.with_window(group.window, None if windows is None else windows.table)
        plan = backend.plan(attention)
    inputs = GroupInputs([], plan, batch.slots if windows is None else windows.slots)
    start = 0
    for queries in (attention.decode, attention.prefill):
        if queries is not None and queries.num_tokens:
            stop = start + queries.num_tokens
            inputs.queries.append((slice(start, stop), queries))
            start = stop
    return inputs
