"""Logits processors, applied before sampling: penalties, logit_bias, min_new_tokens, token masks, custom processors.

Order: repetition penalty, frequency and presence penalties (`penalties`), logit_bias, the end tokens that
min_new_tokens forbids, token masks (`token_masker`), then custom processors (`custom_processors`). logit_bias is not a
mask: it changes a few logits, a mask reads the whole vocabulary, and -100 is a sum, not a ban. Memory does not grow
with the vocabulary or the number of requests while serving, except for V / 8 bytes of each request with a mask.

Legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.step_memory import EDIT_BYTES
from moe_engine.types import FinishReason, NewRow
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.custom_processors import CustomProcessors
from moe_engine.worker.sampling.penalties import Penalties, TreeText
from moe_engine.worker.sampling.slot_tokens import SlotTokens
from moe_engine.worker.sampling.token_masker import TokenMasker

ENTRY_BYTES = 32
"""Scratch memory for one biased logit: its two indices and its value."""


@dataclass(frozen=True)
class _Edit:
    """Biases and forbidden end tokens of a row."""

    bias_ids: np.ndarray  # int64
    bias_values: np.ndarray  # float32
    end_ids: np.ndarray  # int64
    min_length: int
    """End tokens are forbidden while the sequence, prompt included, is shorter than this."""


class LogitsProcessors:
    """The logits processors of all rows.

    Args:
        slot_table: [max_rows, width] int32.
    """

    def __init__(self, vocab_size: int, slot_table: Tensor, stream: DeviceStream) -> None:
        max_rows = slot_table.shape[0]
        self._vocab_size = vocab_size
        self._stream = stream
        self._edits: dict[int, _Edit] = {}
        self.wanted = np.zeros(max_rows, dtype=bool)
        self._changed = np.zeros(max_rows, dtype=bool)
        """Rows with biases or forbidden end tokens."""
        self.penalties = Penalties(max_rows, vocab_size, slot_table, stream)
        self.masks = TokenMasker(max_rows, vocab_size, stream)
        self.custom = CustomProcessors(slot_table, stream)
        self.reads_tokens = np.zeros(max_rows, dtype=bool)
        """Rows whose tokens are read by penalties or custom processors."""
        self._num_reading = 0
        self._num_changed = 0

    @property
    def keeps_tokens(self) -> bool:
        """Whether any row's tokens are read."""
        return self._num_reading > 0

    @property
    def active(self) -> bool:
        """Whether any row has logits processors."""
        return bool(self._edits)

    def applies_to(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has logits processors."""
        return self.active and bool(self.wanted[rows].any())

    def enter(self, new: NewRow) -> None:
        sampling = new.sampling
        ends: tuple[int, ...] = ()
        if sampling.min_new_tokens > 0:
            ends = tuple(t for t in {*new.eos_token_ids, *sampling.stop_token_ids} if 0 <= t < self._vocab_size)
        masked = bool(sampling.allowed_token_ids or sampling.bad_word_ids or sampling.needs_late_masks)
        if not (sampling.reads_tokens or sampling.logit_bias or ends or masked):
            return
        if sampling.reads_tokens:
            self.reads_tokens[new.row] = True
            self._num_reading += 1
        if sampling.has_penalties:
            self.penalties.enter(new)
        if masked:
            self.masks.enter(new)
        if sampling.custom_logit_processor is not None:
            self.custom.enter(new)
        self._edits[new.row] = _Edit(
            np.array([token for token, _ in sampling.logit_bias], dtype=np.int64),
            np.array([value for _, value in sampling.logit_bias], dtype=np.float32),
            np.array(ends, dtype=np.int64),
            new.num_prompt + sampling.min_new_tokens,
        )
        self.wanted[new.row] = True
        if sampling.logit_bias or ends:
            self._changed[new.row] = True
            self._num_changed += 1

    def forget(self, row: int) -> None:
        if self._edits.pop(row, None) is not None:
            self._num_changed -= int(self._changed[row])
            self.wanted[row] = self._changed[row] = False
            self.penalties.forget(row)
            self.masks.forget(row)
            self.custom.forget(row)
            self._num_reading -= int(self.reads_tokens[row])
            self.reads_tokens[row] = False

    def apply(
        self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: SlotTokens, trees: TreeText | None = None
    ) -> None:
        """Changes logits [S, V] in place. `lengths[i]` is the number of tokens before the sampled one.

        Args:
            tokens: token ids by KV slot, of rows in `reads_tokens`.
            trees: context of the first rows of logits, if these are nodes of draft trees.
        """
        if self._num_reading:
            self.penalties.apply(logits, rows, lengths, tokens, trees)
        if self._num_changed:
            self._bias(logits, rows, lengths)
        self.masks.apply(logits, rows)
        self.custom.apply(logits, rows, lengths, tokens, trees)

    def _bias(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Adds logit_bias, and forbids the end tokens of outputs below min_new_tokens."""
        biased: list[tuple[int, np.ndarray, np.ndarray]] = []
        banned: list[tuple[int, np.ndarray, np.ndarray]] = []
        for index in np.nonzero(self._changed[rows])[0].tolist():
            edit = self._edits[int(rows[index])]
            if len(edit.bias_ids):
                biased.append((index, edit.bias_ids, edit.bias_values))
            if lengths[index] < edit.min_length:
                banned.append((index, edit.end_ids, edit.bias_values[:0]))
        for places, ids, values in _pieces(biased):
            added = self._stream.from_array(values)
            logits.index_put_(self._indices(places, ids), added, accumulate=True)
        for places, ids, _ in _pieces(banned):
            logits.index_put_(self._indices(places, ids), logits.new_full((), -torch.inf))

    def take_errors(self) -> dict[int, FinishReason] | None:
        """Reasons why tokens are invalid, by row, since the last call."""
        if not self.masks.errors and not self.custom.errors:
            return None
        errors = self.masks.errors | self.custom.errors
        self.masks.errors, self.custom.errors = {}, {}
        return errors

    def _indices(self, places: np.ndarray, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        place, token = self._stream.from_array(np.stack((places, ids)))
        return place, token


def _pieces(edits: list[tuple[int, np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Row, token ids and values of each edit -> columns (row, id, value) of all, a bounded number at a time."""
    most, begin, count = EDIT_BYTES // ENTRY_BYTES, 0, 0
    for end, (_, ids, _) in enumerate(edits, 1):
        count += len(ids)
        following = len(edits[end][1]) if end < len(edits) else 0
        if end == len(edits) or count + following > most:
            part = edits[begin:end]
            if count:
                yield (
                    np.repeat([place for place, _, _ in part], [len(ids) for _, ids, _ in part]),
                    np.concatenate([ids for _, ids, _ in part]),
                    np.concatenate([values for _, _, values in part]),
                )
            begin, count = end, 0
