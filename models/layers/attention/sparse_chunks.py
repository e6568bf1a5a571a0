"""The chunks of a step with sparse attention: requests beyond the indexer's top-k attend to selected tokens, others to
their whole context as in dense MLA, with the same result.

Host work once per step, shared by all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from moe_engine.kernels.attention.protocol import AttentionCapabilities, MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer.in_place import SelectionInPlace
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.layers.attention import mla_chunks
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk


def cut(
    batch: AttentionBatch,
    backend: MLABackend,
    indexer: IndexerKernel,
    top_k: int,
    plan: Any,
    limits: tuple[int, int],
    capabilities: AttentionCapabilities,
) -> list[AttentionChunk]:
    """The chunks of a step, in token order. Arguments as in `mla_chunks.cut`; `limits` are its two maxima.

    A captured decode is one sparse chunk, and so is a decode group with one request beyond the top-k: a token that sees
    no more than the top-k selects all that it sees. In a prefill group each request has its own form.
    """
    decode, prefill = batch.decode, batch.prefill
    if isinstance(plan, SelectionInPlace) and decode is not None:
        tokens = slice(0, decode.num_tokens)
        return [
            AttentionChunk(tokens, decode, plan.attention, absorbed=True, selected=plan.selected, index_plan=plan.index)
        ]
    if not any(exceeds(queries, top_k) for queries in (decode, prefill)):
        return mla_chunks.cut(batch, backend, plan, *limits, capabilities)
    chunks: list[AttentionChunk] = []
    if decode is not None and decode.num_tokens:
        tokens = slice(0, decode.num_tokens)
        if exceeds(decode, top_k):
            chunks.append(_sparse(decode, tokens, indexer, top_k, capabilities))
        else:
            chunks.append(AttentionChunk(tokens, decode, plan, absorbed=True))
    start = 0 if decode is None else decode.num_tokens
    if prefill is None or not prefill.num_tokens:
        return chunks
    prefill.refuse_tree("expanded")
    for queries, is_sparse in by_form(prefill, top_k, limits[1]):
        stop = start + queries.num_tokens
        if is_sparse:
            chunks.append(_sparse(queries, slice(start, stop), indexer, top_k, capabilities))
        else:
            dense = AttentionBatch(None, queries)
            own = mla_chunks.cut(dense, backend, backend.plan(dense), *limits, capabilities)
            chunks += [replace(c, tokens=slice(start + c.tokens.start, start + c.tokens.stop)) for c in own]
        start = stop
    return chunks


class SharedSelection:
    """The selection of a draft chain: made by its first step, used by the others (GLM-5's
    index_share_for_mtp_iteration). Steps within the top-k select all tokens that they see."""

    def __init__(self) -> None:
        self._first: list[AttentionChunk] = []

    def apply(self, chunks: list[AttentionChunk]) -> list[AttentionChunk]:
        """The chunks of the next step."""
        if not self._first:
            if all(chunk.selected is not None for chunk in chunks):
                self._first = chunks
            return chunks
        pairs = zip(self._first, chunks, strict=True)
        return [replace(own, selected=first.selected, plan=first.plan, selects=False) for first, own in pairs]


def exceeds(queries: PagedQueries | None, top_k: int) -> bool:
    """True if a context is longer than `top_k`."""
    return queries is not None and max(queries.context_lens, default=0) > top_k


def _sparse(
    queries: PagedQueries, tokens: slice, indexer: IndexerKernel, top_k: int, capabilities: AttentionCapabilities
) -> AttentionChunk:
    assert capabilities.sparse is not None
    selected = Selected.empty(queries, top_k)
    plan = capabilities.sparse.plan(selected)
    return AttentionChunk(tokens, queries, plan, absorbed=True, selected=selected, index_plan=indexer.plan(queries))


def by_form(prefill: PagedQueries, top_k: int, max_tokens: int) -> Iterator[tuple[PagedQueries, bool]]:
    """Neighboring requests of one form; sparse requests at most `max_tokens` query tokens at a time."""
    numbers = range(prefill.num_requests)
    for is_sparse, run in groupby(numbers, lambda i: prefill.context_lens[i] > top_k):
        first, *_ = members = list(run)
        if not is_sparse:
            yield mla_chunks.requests(prefill, first, members[-1] + 1), False
            continue
        for i in members:
            for queries in mla_chunks.tokens_of(prefill, i, max_tokens):
                yield queries, True
