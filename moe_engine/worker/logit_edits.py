"""What requests ask to be done to their logits before sampling: penalties, logit_bias, min_new_tokens.

Order: repetition penalty, frequency and presence penalties, logit_bias, then the end tokens that min_new_tokens
forbids. The repetition penalty counts prompt and output (CTRL, Hugging Face); frequency and presence count outputs
only (OpenAI). Token counts live on the device and only for rows with penalties, so a token sampled by a step still in
flight is counted when the next one samples.

Legend: S sampled rows, V vocabulary, Q penalised rows among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import NewRow
from moe_engine.worker.device_stream import DeviceStream

MAX_ELEMENTS = 1 << 24
"""Penalised logits worked on at once (64 MiB of float32)."""


@dataclass(frozen=True)
class _Edit:
    """One row's wishes. `entry` is its place in the count tables, -1 without penalties."""

    entry: int
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]
    end_ids: tuple[int, ...]
    min_length: int
    """End tokens are forbidden while the sequence, prompt included, is shorter than this."""


class LogitEdits:
    """Rows with wishes about their logits, and the token counts their penalties need."""

    def __init__(self, max_rows: int, vocab_size: int, stream: DeviceStream) -> None:
        self._vocab_size = vocab_size
        self._stream = stream
        self._edits: dict[int, _Edit] = {}
        self.wanted = np.zeros(max_rows, dtype=bool)
        self._free: list[int] = []
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=stream.device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=stream.device)
        # repetition, frequency, presence
        self._strengths = torch.zeros(3, 0, dtype=torch.float32, device=stream.device)

    @property
    def active(self) -> bool:
        """Whether any row has wishes."""
        return bool(self._edits)

    def enter(self, new: NewRow) -> None:
        sampling = new.sampling
        ends: tuple[int, ...] = ()
        if sampling.min_new_tokens > 0:
            ends = tuple(t for t in {*new.eos_token_ids, *sampling.stop_token_ids} if 0 <= t < self._vocab_size)
        if not (sampling.has_penalties or sampling.logit_bias or ends):
            return
        entry = self._count(new) if sampling.has_penalties else -1
        bias_ids = tuple(token for token, _ in sampling.logit_bias)
        bias_values = tuple(value for _, value in sampling.logit_bias)
        min_length = new.num_prompt + sampling.min_new_tokens
        self._edits[new.row] = _Edit(entry, bias_ids, bias_values, ends, min_length)
        self.wanted[new.row] = True

    def forget(self, row: int) -> None:
        edit = self._edits.pop(row, None)
        if edit is not None:
            self.wanted[row] = False
            if edit.entry >= 0:
                self._free.append(edit.entry)

    def apply(
        self,
        logits: Tensor,
        rows: np.ndarray,
        lengths: np.ndarray,
        tried: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Changes logits [S, V] in place. `lengths[i]` is the number of tokens before the one to be sampled.

        `tried`: drafts among those tokens, which nobody has counted: (index into `rows`, token) of each.
        """
        self._penalise(logits, rows, tried)
        biased: tuple[list[int], list[int], list[float]] = ([], [], [])
        banned: tuple[list[int], list[int]] = ([], [])
        for index in np.nonzero(self.wanted[rows])[0].tolist():
            edit = self._edits[int(rows[index])]
            biased[0].extend([index] * len(edit.bias_ids))
            biased[1].extend(edit.bias_ids)
            biased[2].extend(edit.bias_values)
            if edit.end_ids and lengths[index] < edit.min_length:
                banned[0].extend([index] * len(edit.end_ids))
                banned[1].extend(edit.end_ids)
        if biased[0]:
            values = self._stream.from_list(biased[2], torch.float32)
            logits.index_put_(self._indices(biased[0], biased[1]), values, accumulate=True)
        if banned[0]:
            logits.index_put_(self._indices(*banned), logits.new_full((), -torch.inf))

    def sampled(self, tokens: Tensor, rows: np.ndarray) -> None:
        """Counts the tokens just sampled, tokens [S] int64 >= 0, for the rows with penalties."""
        entries, indices = self._penalised(rows)
        if entries:
            at = self._indices(entries, indices)
            one = torch.ones((), dtype=torch.int32, device=tokens.device)
            self._output_counts.index_put_((at[0], tokens[at[1]]), one, accumulate=True)

    # -- penalties

    def _penalised(self, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """Entries in the count tables, and their indices in `rows`."""
        indices = [i for i in np.nonzero(self.wanted[rows])[0].tolist() if self._edits[int(rows[i])].entry >= 0]
        return [self._edits[int(rows[i])].entry for i in indices], indices

    def _penalise(self, logits: Tensor, rows: np.ndarray, tried: tuple[np.ndarray, np.ndarray] | None) -> None:
        entries, indices = self._penalised(rows)
        if not entries:
            return
        at_once = max(1, MAX_ELEMENTS // self._vocab_size)
        for begin in range(0, len(entries), at_once):
            piece = slice(begin, begin + at_once)
            more = None if tried is None else self._in_piece(indices[piece], *tried)
            self._penalise_rows(logits, *self._indices(entries[piece], indices[piece]), more)

    def _in_piece(self, indices: list[int], where: np.ndarray, what: np.ndarray) -> tuple[Tensor, Tensor]:
        """The drafts that belong to `indices`, as (place in `indices`, token)."""
        places = np.searchsorted(indices, where)
        inside = (places < len(indices)) & (np.array(indices)[places.clip(max=len(indices) - 1)] == where)
        return self._indices(places[inside].tolist(), what[inside].tolist())

    def _penalise_rows(self, logits: Tensor, entry: Tensor, index: Tensor, more: tuple[Tensor, Tensor] | None) -> None:
        repetition, frequency, presence = self._strengths[:, entry].unsqueeze(-1)  # each [Q, 1]
        counts = self._output_counts[entry]  # [Q, V]
        if more is not None:
            counts.index_put_(more, counts.new_ones(()), accumulate=True)
        produced = counts > 0
        edited = logits[index]
        repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
        edited = torch.where(produced | self._in_prompt[entry], repeated, edited)
        logits[index] = edited - counts * frequency - produced * presence

    def _count(self, new: NewRow) -> int:
        """Fills the count tables with the tokens known of a request; returns its entry."""
        if not self._free:
            self._grow()
        entry = self._free.pop()
        sampling = new.sampling
        strengths = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._strengths[:, entry] = self._stream.from_list(strengths, torch.float32)
        self._output_counts[entry].zero_()
        self._in_prompt[entry].zero_()
        prompt = self._stream.from_list(new.token_ids[: new.num_prompt], torch.int64)
        self._in_prompt[entry].index_fill_(0, prompt, True)
        outputs = new.token_ids[new.num_prompt :]
        if outputs:
            counts = torch.from_numpy(np.bincount(outputs, minlength=self._vocab_size).astype(np.int32))
            self._output_counts[entry].copy_(self._stream.upload(counts))
        return entry

    def _grow(self) -> None:
        """Doubles the count tables (1 token count and 1 flag per vocabulary entry and penalised row)."""
        old = self._output_counts.shape[0]
        extra = max(old, 4)
        self._output_counts = torch.cat([self._output_counts, self._output_counts.new_zeros(extra, self._vocab_size)])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(extra, self._vocab_size)])
        self._strengths = torch.cat([self._strengths, self._strengths.new_zeros(3, extra)], dim=1)
        self._free.extend(reversed(range(old, old + extra)))

    def _indices(self, first: Sequence[int], second: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._stream.from_list(first, torch.int64), self._stream.from_list(second, torch.int64)
