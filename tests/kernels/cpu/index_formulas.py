"""Expected scores and selection of an indexer, in float64, and the check of a selection."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer.candidates import Candidates
from moe_engine.kernels.indexer.protocol import BlockChoice, IndexerKernel
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.formulas import filled_cache, normal, paged_queries, slots_of

TOP_K = 20


def select(
    kernel: IndexerKernel, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int = TOP_K
) -> Tensor:
    selected = Selected.empty(queries, top_k)
    selected.slots.fill_(-7)
    kernel.select(q, weights, cache, queries, top_k, selected, kernel.plan(queries))
    return selected.slots


def scores_of(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[t, s] of one request, float64."""
    products = torch.einsum("thi,si->ths", q.double(), keys.double()).relu()
    return torch.einsum("ths,th->ts", products, weights.double())


def check_choices(slots: Tensor, scores: Tensor, own: Tensor, visible: Tensor, top_k: int) -> None:
    """slots [t, K] of one request are its best visible slots: ascending positions; no rejected score is higher than a
    selected one by more than rounding. own [s]: the request's slots."""
    position = {int(slot): i for i, slot in enumerate(own)}
    for row, score, seen in zip(slots, scores, visible):
        chosen = [position[int(slot)] for slot in row if slot >= 0]
        assert chosen == sorted(set(chosen)) and len(chosen) == min(top_k, int(seen.sum()))
        assert (row[len(chosen) :] == -1).all() and seen[chosen].all()
        rest = seen.clone()
        rest[chosen] = False
        if rest.any():
            assert score[rest].max() <= score[chosen].min() + 1e-5 * score.abs().max()


def causal(count: int, context: int) -> Tensor:
    return torch.arange(context)[None, :] <= torch.arange(context - count, context)[:, None]


def check_blocks(kernel: IndexerKernel, dtype: torch.dtype, size: int, count: int) -> None:
    """Blocks chosen with a selection: the best ones of each token by float64, and the last one; the selection among
    their entries is that among all entries outside of which scores do not count."""
    lens = [1, size, 3 * size + 1, 40 * size, 97, 231]
    queries, slots = paged_queries([(1, context) for context in lens])
    cache = filled_cache(queries, slots, 1, 32, dtype=dtype)
    tokens, top_k = len(lens), size + 1
    q, weights = normal(tokens, 6, 32, dtype=dtype), torch.randn(tokens, 6)
    blocks = BlockChoice(size, torch.full((tokens, count), -7, dtype=torch.int32))
    plain = select(kernel, q, weights, cache, queries, top_k)
    selected = Selected.empty(queries, top_k)
    kernel.select(q, weights, cache, queries, top_k, selected, kernel.plan(queries), blocks)
    assert torch.equal(plain, selected.slots)
    among = Candidates(queries, blocks, kernel.plan, most=3 * count * size)
    inside = Selected.empty(queries, top_k)
    for part, table in among.parts():
        own = Selected(inside.slots[part], inside.counts[part], inside.counts_device[part])
        kernel.select(q[part], weights[part], cache, table.queries, top_k, own, table.plan)
    for token, context in enumerate(lens):
        own_slots = slots_of(queries, token)
        scores = scores_of(q[token : token + 1], weights[token : token + 1], cache[own_slots, 0])
        padded = torch.nn.functional.pad(scores, (0, -context % size), value=float("-inf")).view(-1, size)
        most = padded.amax(1)
        most[-1] = float("inf")
        check_choices(
            blocks.found[token : token + 1], most[None], torch.arange(len(most)), torch.ones(1, len(most)).bool(), count
        )
        chosen = blocks.found[token][blocks.found[token] >= 0]
        seen = torch.zeros(len(most), size, dtype=torch.bool)
        seen[chosen] = True
        check_choices(inside.slots[token : token + 1], scores, own_slots, seen.view(1, -1)[:, :context], top_k)
