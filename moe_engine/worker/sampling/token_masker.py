"""Token masks of sampled rows: static ones (allowed_token_ids, bad words of one token), and late ones, which arrive
after the step was launched (`token_masks`). Applied after all other built-in logits processors.

Legend: S sampled rows, V vocabulary, B bytes of a packed mask, Q masked rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.step_memory import EDIT_BYTES
from moe_engine.types import FinishReason, NewRow, SamplingParams
from moe_engine.types.token_masks import LaunchedStep, StepMasks, words_of
from moe_engine.worker.device_stream import DeviceStream

NOTHING_ALLOWED = FinishReason(
    "abort",
    message="no token of the vocabulary is allowed: allowed_token_ids, bad_words, a constraint or max_thinking_tokens "
    "of the request together forbid all; change one of them",
    status_code=400,
)
MASK_BYTES = 13
"""Scratch memory for one masked logit: an eighth of an index of four bytes, its bound, and two copies of it."""
BOUND_BYTES = 4
PREPARED_BYTES = EDIT_BYTES // 2
"""Max memory of the bounds of a step that are computed before its logits; as much is left to apply them."""
BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32("inf"),
    -np.float32("inf"),
)
"""[256, 8] float32 by a byte of a mask: the largest values of its logits, -inf of forbidden tokens."""


@dataclass
class _LateMasks:
    """Late masks of one step: positions of each row, of which the first `used` have been applied.

    Steps usually sample the masked rows in the order of their masks: `next_of` returns these without work per row.
    """

    tables: np.ndarray  # [P, B] uint8
    masks: StepMasks
    bounds: Tensor | None = None
    """[P, V] float32, the largest value of each logit; None: not computed, or a position allows no token."""
    used: dict[int, int] = field(default_factory=dict)
    in_order: int = 0
    """Positions that `next_of` has returned."""

    def is_step_of(self, rows: list[int]) -> bool:
        """Whether these are the rows with masks, in order and with a position each."""
        return len(self.tables) == len(rows) and self.masks.rows == rows and self.masks.counts.count(1) == len(rows)

    @cached_property
    def rows(self) -> np.ndarray:
        """[P], the row of each position."""
        return np.repeat(self.masks.rows, self.masks.counts)

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """By row: first position, number of positions."""
        firsts = [0, *accumulate(self.masks.counts)]
        return {row: (first, count) for row, first, count in zip(self.masks.rows, firsts, self.masks.counts)}

    def next_of(self, rows: np.ndarray) -> slice | None:
        """The next positions of rows [Q]; None if the masks have another order, or if some were taken one by one."""
        if not self.in_order and not self.used and self.is_step_of(rows.tolist()):
            self.in_order = len(rows)
            return slice(0, len(rows))
        end = self.in_order + len(rows)
        if self.used or not np.array_equal(self.rows[self.in_order : end], rows):
            return None
        self.in_order = end
        return slice(end - len(rows), end)

    def take(self, row: int) -> np.ndarray | None:
        """The mask of the row's next position; None if the row needs none."""
        first, count = self.spans[row]
        if count == 0:
            return None
        if self.in_order:
            found, given = np.unique(self.rows[: self.in_order], return_counts=True)
            self.used, self.in_order = dict(zip(found.tolist(), given.tolist())), 0
        place = self.used.get(row, 0)
        if place >= count:
            raise ValueError(f"row {row} samples more positions than its {count} masks")
        self.used[row] = place + 1
        return self.tables[first + place]


class TokenMasker:
    """The masks of all rows. `rows[r]`: whether row r has any."""

    def __init__(self, max_rows: int, vocab_size: int, stream: DeviceStream) -> None:
        self._vocab_size = vocab_size
        self._num_bytes = 4 * words_of(vocab_size)
        self._stream = stream
        self.rows = np.zeros(max_rows, dtype=bool)
        self.errors: dict[int, FinishReason] = {}
        """By row, of this step. Taken by `LogitsProcessors.take_errors`."""
        self._static: dict[int, np.ndarray] = {}
        self._late_rows: set[int] = set()
        self._launched: LaunchedStep | None = None
        self._late: _LateMasks | None = None
        self._device_bounds: Tensor | None = None

    def enter(self, new: NewRow) -> None:
        static = static_mask(new.sampling, self._vocab_size)
        if static is not None:
            self._static[new.row] = static
        if new.sampling.needs_late_masks:
            self._late_rows.add(new.row)
        self.rows[new.row] = True

    def forget(self, row: int) -> None:
        self.rows[row] = False
        self._static.pop(row, None)
        self._late_rows.discard(row)

    def begin(self, launched: LaunchedStep | None) -> None:
        """Begins a step whose late masks come from this object; None: it has none."""
        self._launched, self._late = launched, None

    def prepare(self, masks: StepMasks) -> _LateMasks:
        """The masks of a step in the form that `apply` reads. May run in any thread: on the CPU it computes the bounds
        of small steps, while the step's forward runs."""
        tables = np.frombuffer(masks.bits, dtype=np.uint8).reshape(-1, self._num_bytes)
        prepared = _LateMasks(tables, masks)
        fits = len(tables) * self._vocab_size * BOUND_BYTES <= PREPARED_BYTES
        if not self._stream.asynchronous and fits and tables.view(np.uint32).any(axis=1).all():
            found = BOUNDS.take(tables, axis=0).reshape(len(tables), 8 * self._num_bytes)
            prepared.bounds = torch.from_numpy(found)[:, : self._vocab_size]
        return prepared

    @property
    def launched(self) -> LaunchedStep | None:
        """Records the last step that was launched without its masks."""
        return self._launched

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Masks logits [S, V] in place, in passes over the step's rows in order. Waits for late masks."""
        if not self._late_rows and not self._static:
            return
        if not self._static and self._launched is not None and self._apply_whole(logits, rows.tolist()):
            return
        masked = np.flatnonzero(self.rows[rows])
        if not len(masked):
            return
        late, span = None, None
        if not self._static:
            late = self._late_masks(int(rows[masked[0]]))
            span = late.next_of(rows if len(masked) == len(rows) else rows[masked])
        if late is None or span is None:
            places, found = self._found(rows, masked)
        elif late.bounds is None:
            places, found = masked, late.tables[span]
        else:
            self._apply_bounds(logits, masked, late.bounds[span])
            return
        if not len(places):
            return
        empty = ~found.view(np.uint32).any(axis=1)
        if empty.any():
            for index in places[empty].tolist():  # the request ends, if this position is reached
                logits[index].fill_(torch.nan)
                self.errors[int(rows[index])] = NOTHING_ALLOWED
            places, found = places[~empty], found[~empty]
        at_once = max(1, EDIT_BYTES // (MASK_BYTES * self._vocab_size))
        for begin in range(0, len(places), at_once):
            end = begin + at_once
            self._minimum(logits, places[begin:end], self._bounds(found[begin:end]))

    def _apply_whole(self, logits: Tensor, rows: list[int]) -> bool:
        """Masks all rows of a step in one call, if each has one late mask that is prepared: the usual step."""
        assert self._launched is not None
        late = self._late_masks(rows[0])
        if late.bounds is None or late.in_order or late.used or not late.is_step_of(rows):
            return False
        late.in_order = len(rows)
        torch.minimum(logits, late.bounds, out=logits)
        return True

    def _apply_bounds(self, logits: Tensor, places: np.ndarray, bounds: Tensor) -> None:
        """Masks the rows `places` [Q] of logits by prepared bounds [Q, V]."""
        if len(places) == len(logits):
            self._minimum(logits, places, bounds)
            return
        at_once = max(1, PREPARED_BYTES // (2 * BOUND_BYTES * self._vocab_size))  # two copies of the logits
        for begin in range(0, len(places), at_once):
            end = begin + at_once
            self._minimum(logits, places[begin:end], bounds[begin:end])

    def _found(self, rows: np.ndarray, masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of `masked` that have a mask at their next position, and the masks [Q, B]."""
        tables = self._tables(rows[masked].tolist())
        allows = np.array([table is not None for table in tables], dtype=bool)
        found = [table for table in tables if table is not None]
        return masked[allows], np.stack(found) if found else np.zeros((0, self._num_bytes), dtype=np.uint8)

    def _tables(self, rows: list[int]) -> list[np.ndarray | None]:
        """The masks [B] of rows at their next positions; None: all tokens."""
        static, late = self._static, self._late_rows
        if not static and late:
            return [self._take_late(row) if row in late else None for row in rows]
        found = []
        for row in rows:
            table = static.get(row)
            if row in late:
                own = self._take_late(row)
                if own is not None:
                    table = own if table is None else table & own
            found.append(table)
        return found

    def _take_late(self, row: int) -> np.ndarray | None:
        return self._late_masks(row).take(row)

    def _late_masks(self, row: int) -> _LateMasks:
        """The masks of the launched step; waits for them. `row` needs one."""
        if self._late is None:
            if self._launched is None:
                raise ValueError(f"row {row} needs a mask, but its step was executed without one")
            masks = self._launched.masks.result()
            self._late = self._launched.prepared or self.prepare(masks)
        return self._late

    def _minimum(self, logits: Tensor, places: np.ndarray, bounds: Tensor) -> None:
        """Masks the rows `places` [Q] of logits; bounds [Q, V] float32."""
        if len(places) == len(logits):
            torch.minimum(logits, bounds, out=logits)
            return
        index = self._stream.from_list(places.tolist(), torch.int64)
        logits.index_copy_(0, index, torch.minimum(logits.index_select(0, index), bounds))

    def _bounds(self, tables: np.ndarray) -> Tensor:
        """tables [Q, B] uint8 -> [Q, V] float32 on the device, the largest value of each logit: -inf or +inf. A packed
        upload is small, and the minimum with a table is several times faster on the CPU than a mask of bools."""
        if not self._stream.asynchronous:
            found = torch.from_numpy(BOUNDS.take(tables, axis=0))
        else:
            if self._device_bounds is None:
                self._device_bounds = self._stream.from_array(BOUNDS)
            packed = self._stream.upload(torch.tensor(tables))  # a copy: arrays of masks are read-only
            found = self._device_bounds.index_select(0, packed.view(-1).int())
        return found.view(len(tables), -1)[:, : self._vocab_size]


def static_mask(sampling: SamplingParams, vocab_size: int) -> np.ndarray | None:
    """The packed mask [B] uint8 of tokens allowed at every position; None: all."""
    banned = [ids[0] for ids in sampling.bad_word_ids if len(ids) == 1]
    if not sampling.allowed_token_ids and not banned:
        return None
    bits = np.zeros(32 * words_of(vocab_size), dtype=np.uint8)
    bits[list(sampling.allowed_token_ids) if sampling.allowed_token_ids else slice(vocab_size)] = 1
    bits[banned] = 0
    return np.packbits(bits, bitorder="little")
