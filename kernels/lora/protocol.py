"""LoRA products: y[t] += x[t] @ A[slot of t].T @ B[slot of t], for the tokens of a step that have an adapter.

Legend: T tokens, M of them with an adapter, S adapter slots, P projections that share an input, R max rank,
K in-features, N out-features of all projections, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

TILE_TOKENS = 16
"""Tokens of a tile of `AdapterTokens.tiles`."""

Upload = Callable[[Tensor], Tensor]
"""Copies a tensor of the host to the device of the model."""


@dataclass(frozen=True)
class LoraWeights:
    """The adapters of one product in their slots. The scaling (alpha / rank) is part of B; unused ranks are zero.

    Columns [columns[p], columns[p + 1]) of y belong to projection p, whose rows of A are [p * R, (p + 1) * R).
    """

    a: Tensor  # [S, P * R, K]
    b: Tensor  # [S, R, N]
    columns: tuple[int, ...]  # P + 1 column numbers, from 0 to N

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class AdapterTokens:
    """The adapter of each token, and the tokens with an adapter, grouped by slot.

    Made once per step on the host; all layers share it. A run (slot, begin, end) means tokens order[begin:end].
    """

    slots: np.ndarray  # [T] int64, -1: no adapter
    runs: tuple[tuple[int, int, int], ...]
    runs_host: Tensor  # [runs, 3] int64 on the host
    order: Tensor  # [M] int64
    tiles: Tensor  # [tiles, 3] int32: slot, begin, end of at most TILE_TOKENS entries of `order`
    upload: Upload

    @classmethod
    def of(cls, slots: np.ndarray, upload: Upload) -> AdapterTokens | None:
        """None if no token has an adapter."""
        slots = np.asarray(slots, dtype=np.int64)
        order = np.argsort(slots, kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]
        if not len(order):
            return None
        grouped = slots[order]
        begins = np.flatnonzero(np.diff(grouped, prepend=-1))
        ends = np.append(begins[1:], len(order))
        runs = np.stack((grouped[begins], begins, ends), axis=1)
        tiles = [
            (slot, first, min(first + TILE_TOKENS, end))
            for slot, begin, end in runs.tolist()
            for first in range(begin, end, TILE_TOKENS)
        ]
        return cls(
            slots,
            tuple((slot, begin, end) for slot, begin, end in runs.tolist()),
            torch.from_numpy(runs),
            upload(torch.from_numpy(order)),
            upload(torch.tensor(tiles, dtype=torch.int32)),
            upload,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def part(self, tokens: slice) -> AdapterTokens | None:
        """The adapters of some of the tokens."""
        return AdapterTokens.of(self.slots[tokens], self.upload)

    def of_contexts(
        self, tokens: slice, query_lens: Sequence[int], context_lens: Sequence[int], num_rows: int
    ) -> AdapterTokens | None:
        """The adapters of the gathered context rows of requests whose query tokens are `tokens`: the context_lens[i]
        rows of request i in order; if that is not `num_rows`, the rows belong to requests with one adapter."""
        slots = self.slots[tokens]
        first = np.cumsum(query_lens) - np.asarray(query_lens)
        if sum(context_lens) == num_rows:
            return AdapterTokens.of(np.repeat(slots[first], context_lens), self.upload)
        return AdapterTokens.of(np.full(num_rows, slots[0]), self.upload)


class LoraKernel(Protocol):
    name: str

    def add(self, y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> None:
        """y [T, N] += the adapters' products of x [T, K], in place; rows of both may be strided. Sums in float32 or
        better than the dtype of x and y; rows without an adapter are not touched."""

    def add_heads(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, tokens: AdapterTokens) -> None:
        """y[t, h] += x[t, h] @ a[s, h].T @ b[s, h] for the slot s of token t, in place.

        Args:
            y, x: [T, H, N] and [T, H, K], strided views allowed.
            a, b: [S, H or 1, R, K] and [S, H or 1, R, N]; 1: the same for all heads.
        """
