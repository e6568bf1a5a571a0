"""Test routings, their experts, and the expected results: loops in float64, independent of the tested dispatch code.

Toy expert e: y = (1 + e / 8) x + (e + 1) / 16 * roll(x, 1), so that each expert, channel and token has a different
value.
Legend: T tokens, D hidden, K choices, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

MAX_TOKENS = 6
KINDS = ("uniform", "one_expert_set", "first_rank_only", "half_dropped", "all_dropped", "dead_rank")


@dataclass(frozen=True)
class Routing:
    """`ids[r]`: the choices of rank r's tokens, [T_r][K]; activations and weights follow from the seed."""

    seed: int
    num_experts: int
    top_k: int
    ids: tuple[tuple[tuple[int, ...], ...], ...]

    def of(self, rank: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D], ids [T, K] int32, weights [T, K] float32 of a rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        num_tokens = len(self.ids[rank])
        size = torch.rand(num_tokens, 1, generator=generator) * 4  # rows of different magnitude: FP8 scales matter
        x = (torch.randn(num_tokens, hidden, generator=generator) * size).to(dtype)
        weights = torch.rand(num_tokens, self.top_k, generator=generator)
        ids = torch.tensor(self.ids[rank], dtype=torch.int32).view(num_tokens, self.top_k)
        return x, ids, weights

    def rows_of_experts(self) -> list[int]:
        """Number of rows of each expert, counted in Python."""
        counts = [0] * self.num_experts
        for rank in self.ids:
            for token in rank:
                for expert in token:
                    if expert >= 0:
                        counts[expert] += 1
        return counts


def toy_expert(x: Tensor, expert: int) -> Tensor:
    return (1 + expert / 8) * x + (expert + 1) / 16 * torch.roll(x, 1, dims=-1)


@lru_cache(64)
def expected(routing: Routing, rank: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`dense` of a rank's tokens, computed once for all dispatchers."""
    return dense(*routing.of(rank, hidden, dtype))


def dense(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 [T, D]: the sum itself, the sum of magnitudes, and the sum of FP8 rounding errors at most."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    magnitude, fp8_error = torch.zeros_like(total), torch.zeros_like(total)
    exact = x.double()
    rounding = exact.abs() / 16 + exact.abs().amax(1, keepdim=True) / 448 / 1024 if len(x) else exact
    for token in range(len(x)):
        for k, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                weight = float(weights[token, k])
                total[token] += weight * toy_expert(exact[token], expert)
                magnitude[token] += weight * toy_expert(exact[token].abs(), expert)
                fp8_error[token] += weight * toy_expert(rounding[token], expert)
    return total, magnitude, fp8_error


def draw_ids(
    kind: str, num_tokens: int, num_experts: int, top_k: int, num_ranks: int, generator: np.random.Generator
) -> tuple[tuple[int, ...], ...]:
    """Random choices of a rank's tokens; an expert at most once per token."""
    ids = np.empty((num_tokens, top_k), dtype=int)
    for row in ids:
        row[:] = generator.permutation(num_experts)[:top_k]
    local = num_experts // num_ranks
    if kind == "one_expert_set":
        ids[:] = np.arange(top_k)
    elif kind == "first_rank_only":
        ids[ids >= local] = -1
    elif kind == "half_dropped":
        ids[generator.random(ids.shape) < 0.5] = -1
    elif kind == "all_dropped":
        ids[:] = -1
    elif kind == "dead_rank":
        ids[ids // local == num_ranks - 1] = -1
    return tuple(tuple(int(expert) for expert in row) for row in ids)


@st.composite
def routings(draw: st.DrawFn, num_ranks: int, local_and_top_k: list[tuple[int, int]]) -> Routing:
    """Any number of tokens on each rank, also 0, and every kind of choice."""
    local, top_k = draw(st.sampled_from(local_and_top_k))
    sizes = draw(st.lists(st.integers(0, MAX_TOKENS), min_size=num_ranks, max_size=num_ranks))
    seed = draw(st.integers(0, 2**20))
    kind = draw(st.sampled_from(KINDS))
    return routing_of(kind, tuple(sizes), local * num_ranks, top_k, seed)


def routing_of(kind: str, sizes: tuple[int, ...], num_experts: int, top_k: int, seed: int = 5) -> Routing:
    """Sizes: tokens of each rank."""
    generator = np.random.default_rng(seed)
    ids = tuple(draw_ids(kind, size, num_experts, top_k, len(sizes), generator) for size in sizes)
    return Routing(seed, num_experts, top_k, ids)
