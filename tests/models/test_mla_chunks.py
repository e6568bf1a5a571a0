"""Cutting a step for MLA: every query token once, in order, within the limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.queries import AttentionBatch, PagedQueries, SharedRun
from moe_engine.models.layers.attention import mla_chunks
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk


def cut(batch: AttentionBatch, backend: Any, plan: Any, *limits: int) -> list[AttentionChunk]:
    return mla_chunks.cut(batch, backend, plan, *limits, backend.capabilities)


class CountingMLA:
    """Has no parts; only plans are requested."""

    name = "counting"
    capabilities = AttentionCapabilities()

    def __init__(self) -> None:
        self.planned: list[AttentionBatch] = []

    def plan(self, batch: AttentionBatch) -> Any:
        self.planned.append(batch)
        return len(self.planned)

    def absorbed(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    gather_latent = expanded = absorbed


def queries(lengths: list[tuple[int, int]], first_row: int = 0) -> PagedQueries:
    query_lens, context_lens = [q for q, _ in lengths], [c for _, c in lengths]
    return PagedQueries(
        query_lens=query_lens,
        context_lens=context_lens,
        rows=torch.arange(first_row, first_row + len(lengths), dtype=torch.int32),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens_device=torch.tensor(context_lens, dtype=torch.int32),
        slot_table=torch.zeros(64, 64, dtype=torch.int32),
        page_size=1,
    )


def check(
    chunks: list[AttentionChunk], decode: list[tuple[int, int]], prefill: list[tuple[int, int]], limits: tuple[int, int]
) -> None:
    seen: list[tuple[int, int]] = []  # (row, position) of each query token, in token order
    stop = 0
    for chunk in chunks:
        part = chunk.queries
        assert chunk.tokens == slice(stop, stop + part.num_tokens)
        stop = chunk.tokens.stop
        assert part.query_starts.tolist() == torch.tensor([0, *part.query_lens]).cumsum(0).tolist()
        assert part.context_lens_device.tolist() == part.context_lens
        if chunk.context_chunks:
            check_parts(chunk, max(1, limits[0] // 2))
        elif not chunk.absorbed:
            assert part.num_context_tokens <= limits[0]
        elif part.rows[0] >= len(decode):
            assert part.num_tokens <= limits[1]
        for row, num, context in zip(part.rows.tolist(), part.query_lens, part.context_lens):
            seen += [(row, position) for position in range(context - num, context)]
    want = [(i, p) for i, (num, context) in enumerate(decode + prefill) for p in range(context - num, context)]
    assert seen == want


def check_parts(chunk: AttentionChunk, half: int) -> None:
    """The whole context in order, each part within half of the limit, and so the query tokens."""
    (count,), (context,), stop = chunk.queries.query_lens, chunk.queries.context_lens, 0
    assert not chunk.absorbed and chunk.plan is None and count <= half
    for part in chunk.context_chunks:
        assert part.plan.queries is chunk.queries and part.plan.first_keys == [stop]
        assert part.plan.key_lens == [part.num_tokens] and 1 <= part.num_tokens <= half
        stop += part.num_tokens
        assert part.plan.causal == (stop == context)
    assert stop == context


def test_nothing_to_cut() -> None:
    backend = CountingMLA()
    batch = AttentionBatch(queries([(1, 9)]), queries([(4, 4), (5, 11)], 1))
    chunks = cut(batch, backend, "plan", 15, 2)
    assert [(p.absorbed, p.plan) for p in chunks] == [(True, "plan"), (False, "plan")]
    assert chunks[0].queries is batch.decode and chunks[1].queries is batch.prefill
    assert cut(AttentionBatch(None, None), backend, None, 1, 1) == [] and backend.planned == []


def test_long_requests_are_absorbed_in_parts() -> None:
    backend = CountingMLA()
    prefill = [(4, 4), (5, 21), (3, 3), (6, 6), (4, 9)]
    chunks = cut(AttentionBatch(None, queries(prefill)), backend, None, 10, 2)
    check(chunks, [], prefill, (10, 2))
    assert [p.absorbed for p in chunks] == [False, True, True, True, False, False]
    assert [p.plan for p in chunks] == [1, 2, 3, 4, 5, 6]
    assert all((b.decode is not None) == p.absorbed for b, p in zip(backend.planned, chunks))


def test_a_context_one_token_longer_than_the_limit_is_expanded_in_parts() -> None:
    prefill = [(4, 4), (5, 21), (13, 14), (3, 3)]
    for limit, whole in ((21, True), (20, False)):
        chunks = cut(AttentionBatch(None, queries(prefill)), TorchMLA(), None, limit, 2)
        check(chunks, [], prefill, (limit, 2))
        assert not any(chunk.absorbed for chunk in chunks)
        assert [[part.num_tokens for part in chunk.context_chunks] for chunk in chunks if chunk.context_chunks] == (
            [] if whole else [[6, 6, 9]]
        )


@pytest.mark.parametrize("make", [CountingMLA, TorchMLA])
def test_random_steps(make: Callable[[], Any]) -> None:
    draw = random.Random(0)
    for _ in range(100):
        groups: list[list[tuple[int, int]]] = []
        for most in (4, 6):
            lens = [draw.randint(1, 9) for _ in range(draw.randint(0, most))]
            groups.append([(n, n + draw.randint(0, 20)) for n in lens])
        decode, prefill = groups
        limits = (draw.randint(5, 40), draw.randint(1, 5))
        batch = AttentionBatch(queries(decode) if decode else None, queries(prefill, len(decode)) if prefill else None)
        check(cut(batch, make(), None, *limits), decode, prefill, limits)


class SharingMLA(CountingMLA):
    capabilities = AttentionCapabilities(expanded_shared=CountingMLA().absorbed)


def test_runs_that_share_tokens_are_pieces_of_their_own() -> None:
    generator = torch.Generator().manual_seed(4)
    group = queries([(4, 9), (3, 20), (2, 22), (5, 21), (6, 6)])
    table = torch.randint(0, 1000, group.slot_table.shape, generator=generator, dtype=torch.int32)
    table[1:4, :17] = table[1, :17]
    shared = replace(group, slot_table=table, shared=[SharedRun(1, 4, 17)])
    for limit, backend in [(1000, SharingMLA()), (17 + 3 + 5 + 4, SharingMLA())]:
        chunks = cut(AttentionBatch(None, shared), backend, "step", limit, 8)
        assert [chunk.tokens for chunk in chunks] == [slice(0, 4), slice(4, 14), slice(14, 20)]
        assert [chunk.shared is None for chunk in chunks] == [True, False, True]
        run, context = chunks[1].queries, chunks[1].shared
        assert context is not None and context.queries.num_context_tokens == 17 + 3 + 5 + 4
        assert (run.query_lens, run.context_lens) == ([3, 2, 5], [20, 22, 21])
        gathered = context.queries.slot_table[context.queries.rows[0]]
        for i, row in enumerate([1, 2, 3]):
            length = run.context_lens[i]
            found = gathered[run.slot_table[run.rows[i], :length].long()]
            assert found.tolist() == table[row, :length].tolist()
    too_many = cut(AttentionBatch(None, shared), SharingMLA(), "step", 28, 8)
    assert all(chunk.shared is None for chunk in too_many)
    assert all(chunk.shared is None for chunk in cut(AttentionBatch(None, shared), CountingMLA(), "step", 1000, 8))
