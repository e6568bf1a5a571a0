"""Chunked MLA prefill: a step's queries, cut so that MLA expands a bounded number of context tokens at once, and
expands shared prefixes only once.

Host work once per step, shared by all layers. In the common case no query is cut and the step's own plan is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_engine.kernels.attention.parts import chunk_lens
from moe_engine.kernels.attention.protocol import AttentionCapabilities, ContextChunks, MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.queries import AttentionBatch, PagedQueries, SharedRun
from moe_engine.models.batch import ExpandedContext


@dataclass(frozen=True)
class SharedContext:
    """The context tokens of some requests, without duplicates: `queries` gathers them like those of one request."""

    run: SharedRun
    queries: PagedQueries
    plan: Any


@dataclass(frozen=True)
class ContextChunk:
    """A chunk of a context, and the backend's plan to gather and attend to it."""

    num_tokens: int
    plan: Any


@dataclass(frozen=True)
class AttentionChunk:
    """Some queries of a step, their tokens, and their MLA form."""

    tokens: slice
    queries: PagedQueries
    plan: Any
    absorbed: bool
    shared: SharedContext | None = None
    """For an expanded chunk with a shared prefix; `queries.slot_table` then has indices of the gathered rows."""
    context_chunks: tuple[ContextChunk, ...] = ()
    """For an expanded chunk of one request whose context is too long to be expanded as a whole."""
    selected: Selected | None = None
    """For an absorbed chunk whose tokens attend to selected tokens; `plan` is that of sparse attention."""
    selects: bool = True
    """Whether the indexer sets `selected`; otherwise an earlier draft step has set it."""
    index_plan: Any = None
    """The indexer's plan of these queries."""
    expanded: ExpandedContext | None = None
    """For an expanded chunk: where its keys and values are known, or kept."""


def cut(
    batch: AttentionBatch,
    backend: MLABackend,
    plan: Any,
    max_expanded_tokens: int,
    max_absorbed_tokens: int,
    capabilities: AttentionCapabilities,
    expanded: ExpandedContext | None = None,
) -> list[AttentionChunk]:
    """The chunks of a step, in token order.

    Args:
        plan: the step's plan; chunks that were cut get separate plans.
        max_expanded_tokens: context tokens expanded at once. A request with more is expanded in context chunks if the
            backend can merge these (with half as many query tokens at once, chunks of half the size), else it runs in
            the absorbed form.
        max_absorbed_tokens: query tokens of an absorbed request run at once.
        capabilities: of the backend.
        expanded: keys and values of the prefill group that are known, or kept.

    Raises:
        ValueError: if the prefill group is a draft tree; verification belongs to the decode group.
    """
    chunks: list[AttentionChunk] = []
    start = 0
    if batch.decode is not None and batch.decode.num_tokens:
        start = batch.decode.num_tokens
        chunks.append(AttentionChunk(slice(0, start), batch.decode, plan, absorbed=True))
    prefill = batch.prefill
    if prefill is None or not prefill.num_tokens:
        return chunks
    prefill.refuse_tree("expanded")
    runs = [] if capabilities.expanded_shared is None else _worth_sharing(prefill, max_expanded_tokens)
    if not runs and prefill.num_context_tokens <= max_expanded_tokens:
        kept = expanded if prefill.num_requests == 1 else None
        whole = slice(start, start + prefill.num_tokens)
        chunks.append(AttentionChunk(whole, prefill, plan, absorbed=False, expanded=kept))
        return chunks
    limits = max_expanded_tokens, max_absorbed_tokens
    for queries, absorbed, shared in _cut_runs(prefill, runs, backend, *limits, capabilities.chunks is not None):
        known = expanded if shared is not None and expanded is not None and shared.run == expanded.run else None
        stop, own = start + queries.num_tokens, None
        context_chunks: tuple[ContextChunk, ...] = ()
        if not absorbed and shared is None and queries.num_context_tokens > max_expanded_tokens:
            assert capabilities.chunks is not None
            context_chunks = _context_chunks(queries, capabilities.chunks, max_expanded_tokens)
        else:
            own = backend.plan(AttentionBatch(queries, None) if absorbed else AttentionBatch(None, queries))
        tokens = slice(start, stop)
        chunks.append(AttentionChunk(tokens, queries, own, absorbed, shared, context_chunks, expanded=known))
        start = stop
    return chunks


def _worth_sharing(prefill: PagedQueries, limit: int) -> list[SharedRun]:
    """The shared prefixes that fit the limit."""
    return [
        run
        for run in prefill.shared
        if sum(prefill.context_lens[run.first : run.last]) - (run.last - run.first - 1) * run.length <= limit
    ]


def _cut_runs(
    prefill: PagedQueries, runs: list[SharedRun], backend: MLABackend, limit: int, max_absorbed: int, in_chunks: bool
) -> Iterator[tuple[PagedQueries, bool, SharedContext | None]]:
    """Each shared run unchanged, and the requests in between cut within the limits."""
    start = 0
    for run in [*runs, SharedRun(prefill.num_requests, prefill.num_requests, 0)]:
        if start < run.first:
            between = requests(prefill, start, run.first)
            for queries, absorbed in _cut_prefill(between, limit, max_absorbed, in_chunks):
                yield queries, absorbed, None
        if run.first < run.last:
            queries, shared = _share(prefill, run, backend)
            yield queries, False, shared
        start = run.last


def _share(prefill: PagedQueries, run: SharedRun, backend: MLABackend) -> tuple[PagedQueries, SharedContext]:
    """The shared tokens come first, then the remaining tokens of each request."""
    queries, length = requests(prefill, run.first, run.last), run.length
    rows, device = queries.rows.tolist(), queries.rows.device
    own = [context - length for context in queries.context_lens]
    slots = [prefill.slot_table[rows[0], :length]]
    slots += [prefill.slot_table[row, length : length + count] for row, count in zip(rows, own)]
    table = torch.zeros((len(own), length + max(own)), dtype=torch.int32)
    table[:, :length] = torch.arange(length, dtype=torch.int32)
    first = length
    for places, count in zip(table, own):
        places[length : length + count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    once = torch.tensor([0, 1, first], dtype=torch.int32, device=device)
    gathered = PagedQueries([1], [first], once[:1], once[:2], once[2:], torch.cat(slots)[None], 1)
    numbers = torch.arange(len(own), dtype=torch.int32, device=device)
    queries = replace(queries, rows=numbers, slot_table=table.to(device), page_size=1)
    return queries, SharedContext(run, gathered, backend.plan(AttentionBatch(None, gathered)))


def _context_chunks(queries: PagedQueries, chunks: ContextChunks, limit: int) -> tuple[ContextChunk, ...]:
    """The context chunks of one request."""
    (count,), (context,), context_chunks = queries.query_lens, queries.context_lens, []
    first = 0
    for length in chunk_lens(context, count, _half(limit)):
        context_chunks.append(ContextChunk(length, chunks.plan(queries, [first], [length])))
        first += length
    return tuple(context_chunks)


def _half(limit: int) -> int:
    """Tokens of a context chunk, and query tokens per pass: with one expanded context, the other half of the memory is
    for the results of a chunk and of its merge partner."""
    return max(1, limit // 2)


def _cut_prefill(
    queries: PagedQueries, limit: int, max_absorbed: int, in_chunks: bool
) -> Iterator[tuple[PagedQueries, bool]]:
    """`in_chunks`: a request beyond the limit is expanded in context chunks."""
    first, context = 0, 0
    for i, length in enumerate(queries.context_lens):
        if length > limit:
            if first < i:
                yield requests(queries, first, i), False
            for tokens in tokens_of(queries, i, _half(limit) if in_chunks else max_absorbed):
                yield tokens, not in_chunks
            first, context = i + 1, 0
        elif context + length > limit:
            yield requests(queries, first, i), False
            first, context = i, length
        else:
            context += length
    if first < queries.num_requests:
        yield requests(queries, first, queries.num_requests), False


def requests(queries: PagedQueries, first: int, last: int) -> PagedQueries:
    """Requests [first, last) of the group."""
    starts = queries.query_starts[first : last + 1]
    return PagedQueries(
        query_lens=queries.query_lens[first:last],
        context_lens=queries.context_lens[first:last],
        rows=queries.rows[first:last],
        query_starts=starts - starts[0],
        context_lens_device=queries.context_lens_device[first:last],
        slot_table=queries.slot_table,
        page_size=queries.page_size,
    )


def tokens_of(queries: PagedQueries, i: int, size: int) -> Iterator[PagedQueries]:
    """Request i, `size` query tokens at a time; each part sees the context up to its last token."""
    total, end = queries.query_lens[i], queries.context_lens[i]
    whole = requests(queries, i, i + 1)
    for start in range(0, total, size):
        length = min(size, total - start)
        unseen = total - start - length
        yield PagedQueries(
            query_lens=[length],
            context_lens=[end - unseen],
            rows=whole.rows,
            query_starts=whole.query_starts.clamp(max=length),
            context_lens_device=whole.context_lens_device - unseen,
            slot_table=whole.slot_table,
            page_size=whole.page_size,
        )
