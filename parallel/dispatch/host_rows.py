"""The functions of `rows` and `layouts` for ranks with host tensors, by the kernels of `kernels.permutation`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import TokenRows
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch import rows as torch_rows
from moe_engine.parallel.dispatch.payload import RecordFormat, decode
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, Tokens

FEW = 64
"""Max records with cached views: creating views takes longer than filling them."""


def taking_part(group: Group) -> Tensor:
    """bool [R]: the ranks that `TokenRows.route` may send to."""
    return torch.ones(group.size, dtype=torch.bool) if group.alive is None else group.alive.cpu()


class GrowingRows:
    """A grow-only buffer of rows of one width. A result is valid until the next `take`."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._rows = torch.empty(0, width, dtype=dtype)

    def take(self, count: int) -> Tensor:
        """Uninitialised [count, width]."""
        if count > len(self._rows):
            self._rows = self._rows.new_empty(max(count, 2 * len(self._rows)), self._rows.shape[1])
        return self._rows[:count]


class GrowingRecords:
    """A grow-only buffer of records, as bytes and as views of their tokens."""

    def __init__(self, form: RecordFormat) -> None:
        self._form = form
        self._grow(0)

    def take(self, count: int) -> tuple[Tensor, Tokens]:
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
        self._known: dict[int, tuple[Tensor, Tokens]] = {}
        self._bytes = torch.empty(count, self._form.num_bytes, dtype=torch.uint8)
        self._parts = self._form.view(self._bytes)


class HostChecks:
    """`exchanged.CheckChoices`: runs the kernel's check, and searches for the error only if it fails."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows

    def __call__(self, ids: Tensor, num_experts: int) -> None:
        if not self._rows.valid(ids, num_experts):
            torch_rows.check_choices(ids, num_experts)


class HostLayout:
    """See `GroupedLayout`: one row per local (token, choice), sorted by expert, then by arrival."""

    def __init__(self, num_experts: int, hidden: int, dtype: torch.dtype, rows: TokenRows) -> None:
        self._num_experts = num_experts
        self._dtype = dtype
        self._token_rows = rows
        self._rows = [GrowingRows(hidden, dtype) for _ in range(NUM_LIVE)]

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        data = decode(tokens, self._dtype)
        offsets, positions = self._token_rows.group(tokens.ids, self._num_experts)
        rows = self._rows[slot].take(int(offsets.numpy()[-1]))
        self._token_rows.spread(data, positions, rows)
        return ExpertBatch("grouped", rows, offsets=offsets), positions

    expand_rows = expand

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return self._token_rows.sum_rows(rows, positions, weights)
