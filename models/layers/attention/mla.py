"""Multi-head latent attention: the projections, and the two forms of the same product (DeepSeek V2, arXiv 2405.04434).

Legend: T tokens, D hidden, H heads, N qk_nope, R rotary width, V v_head, C kv_lora_rank, Q q_lora_rank,
S context tokens. A token's cache row is [normed latent (C) | rotated k_rope (R)].

Absorbed (decode): W_UK is absorbed into the query and W_UV into the output, attention runs over the latent itself.
Expanded (prefill): the context's latent becomes keys and values by kv_b, attention runs per head over N+R and V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.decoder.layers import MAX_TOKENS, FusedMLA, MLALayer
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    common_format,
)
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.formats.online import derived_codes
from moe_engine.models.layers.attention import mla_chunks
from moe_engine.models.layers.attention.latent_queries import LatentQueries
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk, ContextChunk
from moe_engine.models.layers.attention.step_adapters import KVBAdapters, StepAdapters
from moe_engine.models.layers.linear import Linear, Projection, load_linear, prepare_heads
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.sharding import local_attention
from moe_engine.models.step_memory import MAX_ABSORBED_TOKENS, MAX_EXPANDED_TOKENS
from moe_engine.models.tensors.model import layer_index as number_of
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import WHOLE, Share


class MLAAttention:
    """hidden [T, D] -> [T, D]; on many ranks H counts this rank's heads, and the result is their partial sum.

    kv_b is kept twice, as the linear of the expanded form and split per head for the absorbed form:
    2 * H * (N + V) * C elements per layer (DeepSeek V3 in bf16: 67 MB).

    Args:
        max_expanded_tokens: context tokens with expanded keys and values at once, S * H * (N + V) elements. A request
            with a longer context is expanded in chunks, or runs its prefill in the absorbed form.
        layer_name: prefix of the layer's tensors; default ``model.layers.{layer_index}``.
        input_size: width of the input, if it is not that of the hidden states.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        rotary: RotaryTable,
        max_expanded_tokens: int = MAX_EXPANDED_TOKENS,
        max_absorbed_tokens: int = MAX_ABSORBED_TOKENS,
        layer_name: str | None = None,
        input_size: int | None = None,
    ) -> None:
        assert isinstance(config.attention, MLAConfig)
        whole = config.attention.of_layer(layer_index)
        mla, self._share = local_attention(whole, parallel), Share.of(parallel.attn_tp)
        self._mla, self._layer_index, self._rotary = mla, layer_index, rotary
        self._ops, self._linear = backends.ops, backends.linear
        self._backend: MLABackend = backends.attention  # type: ignore[assignment]
        self._capabilities = self._backend.capabilities
        self._scale = config.attention.qk_head_dim**-0.5 * config.rope.softmax_factor
        name = layer_name or f"model.layers.{layer_index}"
        self._latent_scale = config.latent_scale(number_of(name))
        """Divides the cache rows; scores, values and gathered rows are multiplied by it."""
        self._limits, prefix = (max_expanded_tokens, max_absorbed_tokens), f"{name}.self_attn"
        self._absorb_and_write = self._ops.capabilities.absorb
        self._load_query(whole, reader, prefix, input_size or config.hidden_size)
        self._source = mla.source_of(layer_index)
        """The layer whose cache it reads."""
        if self._source == layer_index:
            norm = f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, mla.latent_eps
            self._kv_norm = RMSNorm(self._ops, reader, *norm, factor=mla.latent_factor)
        self._load_kv_b(whole, reader, prefix)
        width, o_proj = whole.num_heads * mla.v_head_dim, [f"{prefix}.o_proj"]
        self._o = load_linear(self._linear, reader, o_proj, [config.hidden_size], width, mla.bias, in_share=self._share)
        self.request_later(self._o.weight.memory)
        self._values_quantized = self._quantize_values()
        self.adapters: StepAdapters | None = None
        """LoRA adapters of the step; None without LoRA."""
        self.kv_b_adapters: KVBAdapters | None = None
        self.fused = self._fuse()
        """The layer in one call, for steps of few absorbed tokens; None if not supported."""

    def _quantize_values(self) -> Callable[[Tensor], QuantizedActivation] | None:
        """[T, H, C] -> o_proj's input by W_UV, quantized in the same launch; None if not supported."""
        quantized, format = self._linear.capabilities.heads_quantized, self._o.input_format
        if quantized is None or not format.rows or self._mla.v_head_dim % BLOCK:
            return None
        return lambda mixed: quantized(mixed, self._w_uv, format)

    def _fuse(self) -> FusedMLA | None:
        decoder = self._capabilities.decoder
        latent = self._queries
        query = self._q if latent is None else latent.query
        if decoder is None or self._mla.index_width or query is None or self._rotary.query_scale is not None:
            return None
        return decoder.fuse_mla(
            MLALayer(
                down=self._kv_a.weight,
                q_norm=None if latent is None else latent.norm.weight,
                q=query.weight,
                kv_norm=self._kv_norm.weight,
                keys=self._w_uk,
                values=self._w_uv,
                o=self._o.weight,
                rotary=self._rotary,
                eps=self._mla.latent_eps,
                scale=self._scale * self._latent_scale,
                latent_scale=self._latent_scale,
            )
        )

    def _load_query(self, mla: MLAConfig, reader: WeightSource, prefix: str, hidden: int) -> None:
        """The products of the layer's input: q_a and kv_a in one if q has a latent, else q and kv_a, in one if the same
        launch reads both results."""
        kernel, shares = self._linear, [self._share]
        query, kv_a = mla.num_heads * mla.qk_head_dim, f"{prefix}.kv_a_proj_with_mqa"
        rank = mla.q_lora_rank
        self._queries: LatentQueries | None = None
        """None: q has no latent."""
        self._q: Linear | None = None
        """The query's product of the layer's input; None: it has a latent, or its rows are in `_kv_a`."""
        if rank is None and self._absorb_and_write is not None and not mla.bias and self._joins(reader, prefix, query):
            both, rows = [f"{prefix}.q_proj", kv_a], [query, mla.cache_width]
            self._kv_a = load_linear(kernel, reader, both, rows, hidden, out_shares=[self._share, WHOLE])
            return
        if rank is None:
            self._kv_a = load_linear(kernel, reader, [kv_a], [mla.cache_width], hidden, mla.bias)
            self._q = load_linear(kernel, reader, [f"{prefix}.q_proj"], [query], hidden, out_shares=shares)
            return
        between = {} if mla.bias else self._rows_between(mla, reader, prefix)
        names, rows = [f"{prefix}.q_a_proj", *between, kv_a], [rank, *between.values(), mla.cache_width]
        self._kv_a = load_linear(kernel, reader, names, rows, hidden, mla.bias)
        norm = RMSNorm(self._ops, reader, f"{prefix}.q_a_layernorm", rank, mla.latent_eps)
        own, indexed = {f"{prefix}.q_b_proj": query}, self._index_queries(mla, prefix)
        self._queries = LatentQueries(kernel, reader, norm, own, self._share, indexed)

    def _rows_between(self, mla: MLAConfig, reader: WeightSource, prefix: str) -> dict[str, int]:
        """Other matrices of the layer's input whose rows are between those of q_a and kv_a, with their numbers."""
        return {}

    def _index_queries(self, mla: MLAConfig, prefix: str) -> dict[str, int]:
        """The projection of the latent to an indexer's queries, by name, with its rows."""
        return {}

    def _joins(self, reader: WeightSource, prefix: str, query: int) -> bool:
        """True if rows of q, of which this rank holds its share, keep whole blocks of a quantized weight before the
        rows of kv_a."""
        format = reader.format.kernel_format(f"{prefix}.q_proj")
        return format is None or self._share.width(query) % format.row_block == 0

    def _load_kv_b(self, whole: MLAConfig, reader: WeightSource, prefix: str) -> None:
        mla = self._mla
        per_head = mla.qk_nope_head_dim + mla.v_head_dim
        num_rows = whole.num_heads * per_head
        part = self._share.cut(num_rows)
        self.kv_b_part = Projection(f"{prefix}.kv_b_proj", (num_rows, mla.kv_lora_rank), Cut(part))
        """kv_b as stored, with this rank's rows."""
        weight = reader.linear(*self.kv_b_part)
        heads = weight.view(mla.num_heads, per_head, mla.kv_lora_rank)
        first, last = heads[:, : mla.qk_nope_head_dim], heads[:, mla.qk_nope_head_dim :]
        form, keys = derived_codes(reader.format, mla.qk_nope_head_dim), first.transpose(1, 2).contiguous()
        self._w_uk = prepare_heads(self._linear, keys, form)  # [H, C, N]
        self._keys = None if self._absorb_and_write is None else keys
        scale = self._latent_scale
        if scale != 1.0 and reader.made_up:
            scale = 1.0
        form, values = derived_codes(reader.format, mla.kv_lora_rank), (last * scale).contiguous()
        self._w_uv = prepare_heads(self._linear, values, form)  # [H, V, C]
        if form is not None:
            first.copy_(keys.transpose(1, 2))
            last.copy_(values / scale)
        self._kv_b = Linear(self._linear, weight)

    @property
    def in_stack(self) -> FusedMLA | None:
        """The layer in a call of all layers, if the kernels support it."""
        return self.fused

    @property
    def mla(self) -> MLAConfig:
        """The attention with this rank's heads."""
        return self._mla

    @property
    def inner_norms(self) -> list[RMSNorm]:
        """Norms whose results linear layers read."""
        return [] if self._queries is None else [self._queries.norm]

    @property
    def _adapted(self) -> bool:
        """Whether a token of the step has an adapter."""
        return self.adapters is not None and self.adapters.active

    def request_later(self, weight: Tensor | None) -> None:
        """The product of values may bring `weight` to a cache, which is read after those named before."""
        if weight is not None:
            self._w_uv = replace(self._w_uv, following=(*self._w_uv.following, weight))

    @property
    def first_product(self) -> Linear:
        """Reads the hidden states first."""
        return self._kv_a

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        if self._q is None:
            return self._kv_a.input_format
        return common_format(self._kv_a.input_format, self._q.input_format)

    def chunks(self, batch: ForwardBatch) -> list[AttentionChunk]:
        """Host work of a step, the same for every layer: compute it once and pass it to each `forward`."""
        attention, plan, expanded = batch.attention, batch.attention_plan, batch.expanded
        return mla_chunks.cut(attention, self._backend, plan, *self._limits, self._capabilities, expanded)

    def forward(self, hidden: Activation, batch: ForwardBatch, chunks: list[AttentionChunk] | None = None) -> Tensor:
        cache = self.cache_of(batch)
        chunks = self.chunks(batch) if chunks is None else chunks
        fused, absorbed = self.fused, len(chunks) == 1 and chunks[0].absorbed
        if fused is not None and absorbed and len(hidden) <= MAX_TOKENS and not self._adapted:
            queries, plan = chunks[0].queries, chunks[0].plan
            # `input_format` has no rows, so that `hidden` is a tensor
            return fused.run(hidden, batch.positions, batch.slots, cache, queries, plan)  # type: ignore[arg-type]
        if absorbed and self._values_quantized is not None:
            return self.after(self.attend(self.before(hidden, batch.positions, batch.slots, cache), batch, chunks))
        return self._o(self._values(hidden, batch, chunks).flatten(1))

    def _values(self, hidden: Activation, batch: ForwardBatch, chunks: list[AttentionChunk]) -> Tensor:
        """hidden [T, D] -> the result of the heads [T, H, V]; writes the tokens' cache rows."""
        mla, cache = self._mla, self.cache_of(batch)
        if len(chunks) == 1 and chunks[0].absorbed:
            query = self.before(hidden, batch.positions, batch.slots, cache)
            values = self._values_at_once(query, cache, chunks[0])
            return self._values_of(self.attend(query, batch, chunks)) if values is None else values
        q = self._enter(hidden, batch.positions, batch.slots, cache)
        if len(chunks) == 1 and not chunks[0].context_chunks and chunks[0].tokens == slice(0, len(q)):
            return self._expanded(q, cache, chunks[0])
        out = q.new_empty(q.shape[0], mla.num_heads, mla.v_head_dim)  # [T, H, V]
        for chunk in chunks:
            self._attend(q[chunk.tokens], cache, chunk, out[chunk.tokens])
        return out

    def _values_at_once(self, query: Tensor, cache: Tensor, chunk: AttentionChunk) -> Tensor | None:
        """[T, H, C+R] -> [T, H, V], if the kernels multiply few tokens by W_UV themselves."""
        at_once, weight = self._capabilities.absorbed_values, self._w_uv.data
        if at_once is None or len(query) > at_once.max_tokens or self._values_quantized is not None or self._adapted:
            return None
        if chunk.selected is not None or not isinstance(weight, Tensor) or weight.dtype != query.dtype:
            return None
        scale = self._scale * self._latent_scale
        return at_once.run(query, cache, chunk.queries, scale, chunk.plan, weight)

    def remember(self, hidden: Activation, batch: ForwardBatch) -> None:
        """Writes the cache rows of `forward` without computing its result."""
        kv_a = self._kv_a(hidden)[:, -self._mla.cache_width :]
        norm, where = self._kv_norm, (batch.positions, self._rotary, batch.slots, self.cache_of(batch))
        self._ops.write_latent(kv_a, norm.weight, norm.eps, *where, self._latent_scale)

    # -- a step of one absorbed chunk, split around attention; `before` and `after` take tensors only

    def before(self, hidden: Activation, positions: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        """hidden [T, D] -> queries against the latent [T, H, C+R]; writes the tokens' rows to cache[slots]."""
        if self._absorb_and_write is None or self._keys is None or self._adapted:
            return self._absorb(self._enter(hidden, positions, slots, cache))
        q, kv_a = self._project(hidden)
        self._scale_queries(q, positions)
        norm = self._kv_norm
        where, dtype = (positions, self._rotary, slots, cache), self._query_dtype(cache)
        return self._absorb_and_write(q, self._keys, kv_a, norm.weight, norm.eps, *where, dtype, self._latent_scale)

    def _query_dtype(self, cache: Tensor) -> torch.dtype | None:
        """Type of absorbed queries, if it is not that of the activations."""
        return cache.dtype if self._capabilities.fp8_queries and cache.dtype == torch.float8_e4m3fn else None

    def cache_of(self, batch: ForwardBatch) -> Tensor:
        """This layer's latent cache, [num_slots, C+R]; with index keys it is the first of two tensors."""
        cache = batch.kv[self._source]
        return cache[0] if isinstance(cache, tuple) else cache

    def slots_of(self, batch: ForwardBatch, chunks: list[AttentionChunk]) -> Tensor:
        """The slots [T] of the step's tokens in this layer's cache."""
        return batch.slots

    def attend(self, query: Tensor, batch: ForwardBatch, chunks: list[AttentionChunk]) -> Tensor:
        """[T, H, C+R] -> [T, H, C]."""
        (chunk,) = chunks
        return self._mixed(query, self.cache_of(batch), chunk)

    def after(self, mixed: Tensor) -> Tensor:
        """[T, H, C] -> [T, D]."""
        if self._values_quantized is not None and not self._adapted:
            return self._o(self._values_quantized(mixed))
        return self._o(self._values_of(mixed).flatten(1))

    # -- internals

    def _values_of(self, mixed: Tensor) -> Tensor:
        """[T, H, C] -> [T, H, V]."""
        values = self._linear.run_heads(mixed, self._w_uv)
        self._adapt_values(values, mixed)
        return values

    def _enter(self, hidden: Activation, positions: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        """hidden [T, D] -> rotated q [T, H, N+R]; writes the tokens' rows to cache[slots]."""
        q, kv_a = self._project(hidden)
        self._scale_queries(q, positions)
        self._ops.rotate(q, positions, self._rotary)
        norm, where = self._kv_norm, (positions, self._rotary, slots, cache)
        self._ops.write_latent(kv_a, norm.weight, norm.eps, *where, self._latent_scale)
        return q

    def _project(self, hidden: Activation) -> tuple[Tensor, Tensor]:
        """hidden [T, D] -> q [T, H, N+R], kv_a [T, C+R]."""
        mla = self._mla
        down = self._kv_a(hidden)
        q, kv_a = down[:, : -mla.cache_width], down[:, -mla.cache_width :]
        if self._queries is not None:
            q = self._queries(q).queries()
        elif self._q is not None:
            q = self._q(hidden)
        return q.view(-1, mla.num_heads, mla.qk_head_dim), kv_a

    def _scale_queries(self, q: Tensor, positions: Tensor) -> None:
        """Multiplies q [T, H, N+R] by its positions' factors, in place."""
        if self._rotary.query_scale is not None:
            q.mul_(self._rotary.query_scale[positions][:, None, None])

    def _attend(self, q: Tensor, cache: Tensor, chunk: AttentionChunk, out: Tensor) -> None:
        """q [T, H, N+R] -> out [T, H, V] of one chunk, in its form."""
        if chunk.absorbed:
            self._absorbed(q, cache, chunk, out)
        elif chunk.context_chunks:
            self._expanded_in_chunks(q, cache, chunk, out)
        else:
            out.copy_(self._expanded(q, cache, chunk))

    def _absorbed(self, q: Tensor, cache: Tensor, chunk: AttentionChunk, out: Tensor) -> None:
        """q [T, H, N+R] -> out [T, H, V] over the latent itself."""
        mixed = self._mixed(self._absorb(q, chunk), cache, chunk)
        self._linear.run_heads(mixed, self._w_uv, out=out)
        self._adapt_values(out, mixed, chunk)

    def _adapt_values(self, values: Tensor, mixed: Tensor, chunk: AttentionChunk | None = None) -> None:
        """Adds the adapters' part to values [T, H, V] of mixed [T, H, C]; unlike W_UV they do not include the scale."""
        if self.kv_b_adapters is not None:
            mixed = mixed if self._latent_scale == 1.0 else mixed * self._latent_scale
            self.kv_b_adapters.add_to_values(values, mixed, chunk)

    def _mixed(self, query: Tensor, cache: Tensor, chunk: AttentionChunk) -> Tensor:
        """[T, H, C+R] -> [T, H, C], over the chunk's selection if it has one."""
        width, scale = self._mla.kv_lora_rank, self._scale * self._latent_scale
        if chunk.selected is None:
            return self._backend.absorbed(query, cache, chunk.queries, scale, chunk.plan, width)
        assert self._capabilities.sparse is not None
        return self._capabilities.sparse.run(query, cache, chunk.selected, scale, chunk.plan, width)

    def _absorb(self, q: Tensor, chunk: AttentionChunk | None = None) -> Tensor:
        """q [T, H, N+R] -> [T, H, C+R]. `chunk`: whose tokens they are; None: all of the step."""
        mla = self._mla
        latent = q.new_empty(q.shape[0], mla.num_heads, mla.cache_width)
        self._linear.run_heads(q[..., : mla.qk_nope_head_dim], self._w_uk, out=latent[..., : mla.kv_lora_rank])
        if self.kv_b_adapters is not None:
            nope = q[..., : mla.qk_nope_head_dim]
            self.kv_b_adapters.add_to_query(latent[..., : mla.kv_lora_rank], nope, chunk)
        if mla.qk_rope_head_dim:
            latent[..., mla.kv_lora_rank :] = q[..., mla.qk_nope_head_dim :]
        return latent

    def _expanded(self, q: Tensor, cache: Tensor, chunk: AttentionChunk) -> Tensor:
        """q [T, H, N+R] -> [T, H, V] over keys and values of the whole context."""
        backend, queries, shared = self._backend, chunk.queries, chunk.shared
        gathered, plan = (queries, chunk.plan) if shared is None else (shared.queries, shared.plan)
        kv, rope = self._expand(q, cache, gathered, plan, gathered.num_context_tokens, chunk)
        if chunk.expanded is not None and chunk.expanded.run is None:
            chunk.expanded.layers[self._layer_index] = kv, rope.contiguous()
        attend = backend.expanded if shared is None else self._capabilities.expanded_shared
        assert attend is not None
        return attend(q, kv, rope, queries, self._scale, chunk.plan)

    def _expanded_in_chunks(self, q: Tensor, cache: Tensor, chunk: AttentionChunk, out: Tensor) -> None:
        """`_expanded` in context chunks; at most one chunk's keys and values exist at a time."""
        chunks = self._capabilities.chunks
        assert chunks is not None

        def attend(part: ContextChunk) -> tuple[Tensor, Tensor]:
            """[T, H, V] and its log-sum-exp [T, H], over one context chunk."""
            kv, rope = self._expand(q, cache, chunk.queries, part.plan, part.num_tokens, chunk)
            return chunks.expanded(q, kv, rope, self._scale, part.plan)

        first, *others = chunk.context_chunks
        mixed, lse = attend(first)
        out.copy_(mixed)
        del mixed
        for part in others:
            chunks.merge(out, lse, *attend(part))

    @property
    def expands_slots(self) -> bool:
        """Whether the fused layer attends to expanded rows as to the latent."""
        return self.fused is not None and self._latent_scale == 1.0

    def expand_slots(self, cache: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [S, H, N+V] of the rows of `cache` in slots [S] int32, and their rotary channels [S, R], for
        activations of `dtype`."""
        ints = torch.tensor([0, 1, len(slots)], dtype=torch.int32)
        queries = PagedQueries([1], [len(slots)], ints[:1], ints[:2], ints[2:], slots[None], 1)
        plan = self._backend.plan(AttentionBatch(None, queries))
        like = torch.empty(0, dtype=dtype, device=cache.device)
        chunk = AttentionChunk(slice(0, 1), queries, plan, absorbed=False)
        kv, rope = self._expand(like, cache, queries, plan, len(slots), chunk)
        return kv, rope.contiguous()

    def _expand(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, plan: Any, num_tokens: int, chunk: AttentionChunk
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [S, H, N+V] of the plan's `num_tokens` gathered tokens, which belong to requests of `chunk`,
        and their rotary channels [S, R]."""
        mla, rows = self._mla, None
        if cache.dtype != q.dtype or num_tokens != queries.num_context_tokens:
            rows = q.new_empty(num_tokens, mla.cache_width)
        context = self._backend.gather_latent(cache, queries, plan, rows, mla.kv_lora_rank)  # [S, C+R]
        if self._latent_scale != 1.0:
            context.mul_(self._latent_scale)
        latent = context[:, : mla.kv_lora_rank]
        kv = self._known(chunk, latent)
        if kv is None:
            kv = self._kv_b(latent)
            if self.kv_b_adapters is not None:
                self.kv_b_adapters.add_to_context(kv, latent, chunk)
        return kv.unflatten(1, (mla.num_heads, -1)), context[:, mla.kv_lora_rank :]

    def _known(self, chunk: AttentionChunk, latent: Tensor) -> Tensor | None:
        """Keys and values [S, H*(N+V)] of `latent` [S, C] if those of its first rows are known."""
        expanded = chunk.expanded
        layer = None if expanded is None or expanded.run is None else expanded.layers.get(self._layer_index)
        if expanded is None or layer is None:
            return None
        known = layer[0][: expanded.length].flatten(1)
        return torch.cat((known, self._kv_b(latent[expanded.length :])))
