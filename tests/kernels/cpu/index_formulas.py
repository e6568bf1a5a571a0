"""Expected scores and selection of an indexer, in float64, and the check of a selection."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import PagedQueries

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
