"""Stable rows: what the worker keeps of a request from step to step. A request keeps its row while it runs.

Device: where each token's KV is (`slot_table`) and the token sampled last (`last_token`). Host: how to sample
(`sampling`), what to do to the logits first (`edits`), which log-probabilities to report (`logprobs`). Everything but
the two tables changes only when rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import LogprobSpec, NewRow, RowWrite, row_width
from moe_engine.worker.batch.device_int_table import DeviceIntTable
from moe_engine.worker.batch.slot_tokens import SlotTokens
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_processors import LogitsProcessors
from moe_engine.worker.sampling.sampling_state import SamplingState


@dataclass
class PromptLogprobs:
    """Progress of a request that wants log-probabilities of its prompt."""

    prompt: list[int]
    spec: LogprobSpec
    num_cached: int


class RequestRows:
    """State of `max_rows` rows. `apply` enters and forgets requests; the step's own slots come by `write_slots`.

    With drafts the worker itself counts and remembers tokens: `history` holds them, and a row may run `num_drafts`
    further past the context length for each of the two steps that can be under way.
    """

    def __init__(
        self, max_rows: int, context_len: int, vocab_size: int, stream: DeviceStream, *, num_drafts: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.context_len = context_len
        self.vocab_size = vocab_size
        self._stream = stream
        width = row_width(context_len, num_drafts)
        self.slot_table: Tensor = stream.lazy_zeros((max_rows, width), torch.int32)  # [max_rows, width]
        self.last_token: Tensor = torch.zeros(max_rows, dtype=torch.int64, device=stream.device)
        self.slots_on_host = stream.host_view(self.slot_table)
        """The slot table where it is the host's memory, else None."""
        self._slots = DeviceIntTable(self.slot_table, stream)
        self._last_tokens = DeviceIntTable(self.last_token, stream)
        self.history = TokenBuffer(max_rows, width, stream) if num_drafts else None
        self.sampling = SamplingState(max_rows, vocab_size)
        self.edits = LogitsProcessors(vocab_size, self.slot_table, stream)
        self.slot_tokens: SlotTokens | None = None
        """The text of rows with penalties; None until the size of the KV pool is known."""
        self.logprobs: dict[int, LogprobSpec] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}

    @property
    def width(self) -> int:
        """Entries of a row of the slot table."""
        return self.slot_table.shape[1]

    def apply(self, finished: Sequence[int], new_rows: Sequence[NewRow], writes: Sequence[RowWrite]) -> None:
        """Forgets finished rows, enters new ones, then re-points slots: the order of `StepPlan`."""
        for row in finished:
            self._forget(row)
        for new in new_rows:
            self._enter(new)
        for write in writes:
            if self.edits.penalties.rows[write.row]:
                self._move_tokens(write)
            self._point(write.row, write.start, write.slots)

    def keep_tokens(self, num_slots: int) -> None:
        """Makes room for the token in each slot of the KV pool, the dummy page included; once, at start."""
        self.slot_tokens = SlotTokens(num_slots, self._stream)

    def note_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """A step computes tokens [T] int64 into slots [T] int64. Costs nothing where no row has penalties."""
        if self.edits.penalties.active:
            assert self.slot_tokens is not None
            self.slot_tokens.put(slots, tokens)

    def reserve(self, writes: Sequence[RowWrite]) -> None:
        """Enters slots for tokens to come, in one go."""
        if not writes:
            return
        spans = ((write.row * self.width + write.start, len(write.slots)) for write in writes)
        flat = np.array([at for first, count in spans for at in range(first, first + count)])
        slots = np.array([slot for write in writes for slot in write.slots], dtype=np.int32)
        self._slots.put_from_host(flat, slots)

    def slots_at(self, flat: Tensor) -> Tensor:
        """slot_table.flat[flat[t]], flat [T] int64 -> [T] int64."""
        return self._slots.take(flat)

    def write_slots(self, flat: Tensor, slots: Tensor) -> None:
        """slot_table.flat[flat[t]] = slots[t]; flat [T] int64, slots [T] int32."""
        self._slots.put(flat, slots)

    def check_lengths(self, rows: Sequence[int] | np.ndarray, lengths: np.ndarray) -> None:
        """Raises ValueError if one of some rows, which grow to `lengths` tokens, has no room for them."""
        if len(lengths) and int(lengths.max()) > self.width:
            row = rows[int(lengths.argmax())]
            raise ValueError(f"row {row} grows to {lengths.max()} tokens, its table has {self.width}")

    def last_tokens_of(self, rows: Tensor) -> Tensor:
        """The tokens that rows [n] int64 sampled last, [n] int64."""
        return self._last_tokens.take(rows)

    def set_last_tokens(self, rows: Any, tokens: Any) -> None:
        """Rows [n] int64 sampled tokens [n] int64 >= 0; tensors, or `DeviceStream.arrays`."""
        self._last_tokens.put(rows, tokens)

    def _enter(self, new: NewRow) -> None:
        if not 0 <= new.row < self.max_rows:
            raise ValueError(f"request {new.rid}: row {new.row} is outside the worker's {self.max_rows} rows")
        self._forget(new.row)
        self._point(new.row, 0, new.slots)
        if self.history is not None:
            self.history.enter(new)
        self.sampling.enter(new)
        self.edits.enter(new)
        if new.sampling.has_penalties and new.slots:
            assert self.slot_tokens is not None
            self.slot_tokens.put_from_host(new.slots, new.token_ids[: len(new.slots)])
        if new.logprobs is not None:
            self.logprobs[new.row] = new.logprobs
            if new.logprobs.start is not None:
                prompt = new.token_ids[: new.num_prompt]
                self.prompt_logprobs[new.row] = PromptLogprobs(prompt, new.logprobs, len(new.slots))

    def _forget(self, row: int) -> None:
        self.edits.forget(row)
        self.logprobs.pop(row, None)
        self.prompt_logprobs.pop(row, None)

    def _move_tokens(self, write: RowWrite) -> None:
        """The slots that a row is pointed at hold the same tokens as the ones before, noted or not."""
        assert self.slot_tokens is not None
        old = self.slot_table[write.row, write.start : write.start + len(write.slots)].long()
        self.slot_tokens.move(old, self._stream.from_list(write.slots, torch.int64))

    def _point(self, row: int, start: int, slots: list[int]) -> None:
        if not slots:
            return
        if start + len(slots) > self.width:
            raise ValueError(f"row {row}: tokens up to {start + len(slots)} pass the row's width {self.width}")
        values = self._stream.upload(torch.from_numpy(np.array(slots, dtype=np.int32)))
        self.slot_table[row, start : start + len(slots)].copy_(values)
