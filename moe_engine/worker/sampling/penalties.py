"""Repetition, frequency and presence penalties, computed from the tokens of a row each time it is sampled.

The repetition penalty counts prompt and output (CTRL, Hugging Face); frequency and presence count outputs only
(OpenAI). The work is proportional to the number of tokens, not to the vocabulary, except for one zeroed count of each
vocabulary entry. Scratch memory is bounded (`EDIT_BYTES`, which the memory ledger counts).

Legend: S rows of logits, V vocabulary, Q penalized rows among them, W max tokens of the Q rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.step_memory import EDIT_BYTES, PENALTY_COUNT_BYTES, PENALTY_TOKEN_BYTES
from moe_engine.types import NewRow
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.slot_tokens import SlotTokens


@dataclass(frozen=True)
class TreeText:
    """Context tokens of the first n rows of logits, if these are nodes of draft trees: all tokens of the request before
    position begins[i], and those of the next 64 entries of its slot table whose bit is set in masks[i]."""

    begins: np.ndarray  # [n] int64
    masks: Tensor  # [n] int64
    width: int
    """Max nodes of a tree."""

    def part(self, begin: int, end: int) -> TreeText:
        """The context of rows [begin, end) of logits."""
        return TreeText(self.begins[begin:end], self.masks[begin:end], self.width)


class Penalties:
    """Strengths of the rows with penalties, and their effect on logits."""

    def __init__(self, max_rows: int, vocab_size: int, slot_table: Tensor, stream: DeviceStream) -> None:
        self._vocab_size = vocab_size
        self._slot_table = slot_table
        self._stream = stream
        self.rows = np.zeros(max_rows, dtype=bool)
        """Rows with penalties."""
        self._strengths = np.zeros((max_rows, 3), dtype=np.float32)  # repetition, frequency, presence
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)
        self._count = 0

    @property
    def active(self) -> bool:
        """Whether any row has penalties."""
        return self._count > 0

    def enter(self, new: NewRow) -> None:
        sampling = new.sampling
        self.rows[new.row] = True
        self._count += 1
        self._strengths[new.row] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        self._num_prompt[new.row] = new.num_prompt

    def forget(self, row: int) -> None:
        if self.rows[row]:
            self.rows[row] = False
            self._count -= 1

    def apply(
        self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: SlotTokens, trees: TreeText | None = None
    ) -> None:
        """Changes contiguous logits [S, V] in place; `lengths[i]`: number of tokens before the sampled one."""
        places = np.flatnonzero(self.rows[rows])
        if not len(places):
            return
        seen, ends = lengths.copy(), lengths.copy()
        if trees is not None:
            seen[: len(trees.begins)] = trees.begins
            ends[: len(trees.begins)] = trees.begins + trees.width
        places = places[np.argsort(-ends[places], kind="stable")]  # groups rows of similar length
        begin = 0
        while begin < len(places):
            width = min(int(ends[places[begin]]), self._slot_table.shape[1])
            at_once = max(1, EDIT_BYTES // (PENALTY_COUNT_BYTES * self._vocab_size + PENALTY_TOKEN_BYTES * width))
            self._penalize(logits, places[begin : begin + at_once], rows, seen, width, tokens, trees)
            begin += at_once

    def _penalize(
        self,
        logits: Tensor,
        places: np.ndarray,
        rows: np.ndarray,
        seen: np.ndarray,
        width: int,
        slot_tokens: SlotTokens,
        trees: TreeText | None,
    ) -> None:
        """Penalizes the rows `places` [Q] of logits: the first `seen` tokens of a row count, and of a tree the nodes on
        the path. No row has more than `width` tokens."""
        which, count = rows[places], len(places)
        ints = np.stack([places, which, seen[places], self._num_prompt[which]])
        place, row, begin, prompt = self._stream.from_array(ints)
        strengths = self._stream.from_array(self._strengths[which])
        repetition, frequency, presence = strengths.T.unsqueeze(-1)  # each [Q, 1]
        columns = torch.arange(width, device=logits.device)
        inside = columns < begin[:, None]  # [Q, W]
        if trees is not None:
            inside |= _on_path(columns, begin, place, trees)
        slots = self._slot_table[:, :width].index_select(0, row)
        tokens = slot_tokens.ids.index_select(0, slots.flatten()).view(count, width)
        del slots
        # padded with the row's first token: all entries of a token write the same new logit
        ids = torch.where(inside, tokens, tokens[:, :1]).long()
        del tokens
        produced = (inside & (columns >= prompt[:, None])).int()
        base = torch.arange(count, device=logits.device)[:, None]
        counts = torch.zeros(count * self._vocab_size, dtype=torch.int32, device=logits.device)
        counts.scatter_add_(0, (ids + base * self._vocab_size).flatten(), produced.flatten())
        times = counts.view(count, -1).gather(1, ids)  # [Q, W]
        del counts, inside, produced
        flat = logits.view(-1)
        at = ids.add_(place[:, None] * self._vocab_size).flatten()
        values = flat.gather(0, at).view(count, width)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - times * frequency - (times > 0) * presence
        flat.scatter_(0, at, values.flatten())


def _on_path(columns: Tensor, begin: Tensor, place: Tensor, trees: TreeText) -> Tensor:
    """[Q, W] bool: entries of the slot table with a node's ancestors or the node itself."""
    num = len(trees.masks)
    masks = torch.where(place < num, trees.masks.index_select(0, place.clamp_max(num - 1)), 0)  # [Q]
    node = columns - begin[:, None]  # [Q, W]
    bits = (masks[:, None] >> node.clamp(0, 63)) & 1
    return (bits == 1) & (node >= 0) & (node < 64)
