"""Runs of captured steps over states of requests: the rows of a step are in buffers at fixed addresses, and padding
reads and writes the row of the pool that no request has.

Legend: R requests, K tokens of each, T = R * K; maxima over all captured sizes unless stated otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.worker.kv_cache.state_pool import StatePool


def static_runs(reads: Tensor, rows: Tensor) -> StateRuns:
    """Runs of K tokens each, whose states are all stored. reads [R] int64, rows [R * K] int64."""
    size, count = len(reads), len(rows) // len(reads)
    starts = torch.arange(0, len(rows) + 1, count, dtype=torch.int32, device=reads.device)
    return StateRuns([count] * size, starts, reads, [range(1, count + 1)] * size, rows)


class StaticStates:
    """Buffers of the steps of `StepGraphs`, filled before each replay."""

    def __init__(self, pool: StatePool, max_requests: int, max_tokens: int, device: torch.device) -> None:
        self._padding = pool.max_rows
        self._reads = torch.full((max_requests,), pool.max_rows, dtype=torch.int64, device=device)  # [R]
        self._rows = self._reads  # [T]
        if max_tokens > max_requests:
            self._rows = torch.full((max_tokens,), pool.max_rows, dtype=torch.int64, device=device)

    def runs(self, size: int, count: int) -> StateRuns:
        """Runs of a graph for `size` requests with `count` tokens each."""
        return static_runs(self._reads[:size], self._rows[: size * count])

    def fill(self, read: Tensor | None, stored: StateRuns | None, used: tuple[int, int]) -> None:
        """Copies a step's rows to the buffers: `read` [R] (None: padding only), and those of `stored` if the step
        stores other states. `used`: requests and tokens of the step before, which become padding."""
        requests = tokens = 0
        if read is not None:
            rows = read if stored is None else stored.rows
            requests, tokens = len(read), len(rows)
            self._reads[:requests].copy_(read)
            if self._rows is not self._reads:
                self._rows[:tokens].copy_(rows)
        self._reads[requests : used[0]].fill_(self._padding)
        self._rows[tokens : used[1]].fill_(self._padding)


class ChainStates:
    """States of a captured step with drafts: verification stores the state after each token, acceptance keeps one.

    Args:
        rows: [R] int64 of the size, on the device; negative: padding.
    """

    def __init__(self, pool: StatePool, rows: Tensor, count: int) -> None:
        self._pool, self._rows, self._count = pool, rows, count
        self._reads = torch.full_like(rows, pool.max_rows)
        self._places = rows.new_full((len(rows), count), pool.max_rows)
        self.runs = static_runs(self._reads, self._places.view(-1))

    def find(self) -> None:
        """Before verification: the rows of the pool, from those of the requests."""
        padding, pool = self._rows < 0, self._pool
        self._reads.copy_(self._rows.masked_fill(padding, pool.max_rows))
        within = torch.arange(self._count, device=self._rows.device)
        places = pool.first_positions(self._rows)[:, None] + within
        self._places.copy_(places.masked_fill(padding[:, None], pool.max_rows))

    def keep(self, counts: Tensor) -> None:
        """Keeps the state after the first counts[i] tokens of request i, [R] int64."""
        last = (counts - 1).clamp(0, self._count - 1)
        self._pool.move(self._places.gather(1, last[:, None])[:, 0], self._reads)
