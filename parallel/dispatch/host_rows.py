"""What `rows` and `layouts` do, for ranks whose tensors lie on the host: numpy, whose calls take a tenth of torch's.

A decode step asks for this in every layer with a handful of tokens: the calls are the cost, not the numbers.
Legend: T tokens of this rank, N tokens arrived, K experts per token, E experts of this rank, R ranks, D hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.parallel.dispatch.payload import RecordFormat, decode
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, Tokens
from moe_engine.parallel.dispatch.rows import halves

FEW = 64
"""Records whose views are kept: making them takes longer than filling them."""


def ranks_of(ids: np.ndarray, num_local: int, num_ranks: int) -> np.ndarray:
    """Physical ids [T, K] -> bool [R, T]: whether a rank holds any expert of the token. -1 belongs to nobody."""
    found = np.zeros((num_ranks + 1, len(ids)), dtype=bool)
    found[ids // num_local, np.arange(len(ids))[:, None]] = True  # -1 // num_local names the last row, which goes
    return found[:-1]


def local_ids(ids: np.ndarray, rank: int, num_local: int) -> np.ndarray:
    """Physical ids -> counted from the rank's first expert, -1 where another rank holds it; a copy."""
    local = ids - rank * num_local
    local[local.view(np.uint32) >= num_local] = -1
    return local


def check_choices(ids: Tensor, num_experts: int) -> None:
    """As `rows.check_choices`."""
    if not ids.numel():
        return
    ordered = np.sort(ids.numpy(), axis=1)
    if ordered[:, 0].min() < -1 or ordered[:, -1].max() >= num_experts:
        raise ValueError(f"topk_ids holds an expert outside 0..{num_experts - 1}")
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token = int(twice.any(1).argmax())
        raise ValueError(f"token {token} names an expert twice: {ids[token].tolist()}")


def sum_bags(rows: Tensor, chosen: np.ndarray, sizes: np.ndarray, weights: Tensor | None = None) -> Tensor:
    """Sums of rows [M, D], float32 inside: the next sizes[n] of `chosen` make row n -> [N, D] in rows' dtype.

    Args:
        chosen: int64 [sum(sizes)], rows of `rows`; others are never read.
        weights: float32 [sum(sizes)].
    """
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if weights is not None and rows.dtype != torch.float32:
        # the weights must have the rows' dtype: each row is named twice, with the weight's high and low half
        chosen, offsets, weights = chosen.repeat(2), offsets * 2, halves(weights, rows.dtype).flatten()
    # F.embedding_bag without its checks: scale_grad_by_freq, mode (0: sum), sparse, weights, include_last_offset
    return torch.embedding_bag(
        rows, torch.from_numpy(chosen), torch.from_numpy(offsets), False, 0, False, weights, True
    )[0]


class GrowingRows:
    """Rows of one width, made once and again when more are asked for. What was taken is valid until the next `take`."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._rows = torch.empty(0, width, dtype=dtype)

    def take(self, count: int) -> Tensor:
        """Uninitialised [count, width]."""
        if count > len(self._rows):
            self._rows = self._rows.new_empty(max(count, 2 * len(self._rows)), self._rows.shape[1])
        return self._rows[:count]


class GrowingRecords:
    """Records likewise, as bytes and as the tokens that they hold."""

    def __init__(self, form: RecordFormat) -> None:
        self._form = form
        self._grow(0)

    def take(self, count: int) -> tuple[np.ndarray, Tokens]:
        """Uninitialised uint8 [count, bytes of a record], and views of its parts."""
        known = self._known.get(count)
        if known is not None:
            return known
        if count > len(self._bytes):
            self._grow(max(count, 2 * len(self._bytes)))
        found = self._bytes[:count], self._parts.first(count)
        if count <= FEW:
            self._known[count] = found
        return found

    def _grow(self, count: int) -> None:
        self._known: dict[int, tuple[np.ndarray, Tokens]] = {}
        records = torch.empty(count, self._form.num_bytes, dtype=torch.uint8)
        self._bytes, self._parts = records.numpy(), self._form.view(records)


class HostLayout:
    """As `GroupedLayout`: one row for each (token, choice) that is here, sorted by expert, by arrival inside one."""

    def __init__(self, num_experts: int, hidden: int, dtype: torch.dtype) -> None:
        self._num_experts = num_experts
        self._dtype = dtype
        self._rows = [GrowingRows(hidden, dtype) for _ in range(NUM_LIVE)]

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        data = decode(tokens, self._dtype)
        flat = tokens.ids.numpy().ravel()
        order = flat.argsort(kind="stable")  # [N * K], -1 first
        ends = np.bincount(flat + 1, minlength=self._num_experts + 1).cumsum()  # [E + 1], of -1 first
        num_absent = int(ends[0])
        positions = np.empty(len(flat), dtype=np.int64)
        positions[order] = np.arange(-num_absent, len(flat) - num_absent)
        order = order[num_absent:]  # [M]
        rows = self._rows[slot].take(len(order))
        torch.index_select(data, 0, torch.from_numpy(order // tokens.ids.shape[1]), out=rows)
        offsets = torch.from_numpy((ends - num_absent).astype(np.int32))
        return ExpertBatch("grouped", rows, offsets=offsets), torch.from_numpy(positions).view(tokens.ids.shape)

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        found = positions.numpy()
        valid = found >= 0
        return sum_bags(rows, found[valid], valid.sum(1), torch.from_numpy(weights.numpy()[valid]))
