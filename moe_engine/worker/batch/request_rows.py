"""Request rows: the worker's state of running requests, including the block table (`slot_table`).

A request keeps its row while it runs. Device: the KV slot of each token (`slot_table`) and the last sampled token
(`last_token`). Host: sampling parameters (`sampling`), logits processors (`edits`), requested log-probabilities
(`logprobs`). Everything except the two tables changes only when rows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import LogprobSpec, NewRow, RowWrite
from moe_engine.types.row_sizes import row_width
from moe_engine.worker.batch.row_adapters import RowAdapters
from moe_engine.worker.batch.row_images import RowImages
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.batch.window_table import WindowTable
from moe_engine.worker.device_int_table import DeviceIntTable
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.sampling.logits_processors import LogitsProcessors
from moe_engine.worker.sampling.logprobs import PromptLogprobs
from moe_engine.worker.sampling.sampling_state import SamplingState
from moe_engine.worker.sampling.slot_tokens import SlotTokens


class RequestRows:
    """State of `max_rows` rows. `apply` adds and removes requests; `write_slots` adds the step's own slots.

    With speculation the worker keeps tokens and lengths of its rows in `history`, and a row may exceed the context
    length by `num_drafts` for each of the two steps that can be in flight.
    """

    def __init__(
        self, max_rows: int, context_len: int, vocab_size: int, stream: DeviceStream, *, num_drafts: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.context_len = context_len
        self.vocab_size = vocab_size
        self._stream = stream
        width = row_width(context_len, num_drafts)
        # SGLang: req_to_token; vLLM: block table. The KV slot of each position of each row.
        self.slot_table: Tensor = stream.lazy_zeros((max_rows, width), torch.int32)  # [max_rows, width]
        self.last_token: Tensor = torch.zeros(max_rows, dtype=torch.int64, device=stream.device)
        self.slots_on_host = stream.host_view(self.slot_table)
        """The slot table as an array on the CPU, else None."""
        self.changes = 0
        """Number of calls of `apply`."""
        self.owners = np.zeros(max_rows, dtype=np.int64)
        """A number of the request in each row, which no other request of that row has."""
        self._slots = DeviceIntTable(self.slot_table, stream)
        self._last_tokens = DeviceIntTable(self.last_token, stream)
        self.windows: WindowTable | None = None
        """The table of windowed layers, if their KV is bounded (`bound_windows`)."""
        self.states: StatePool | None = None
        """The states of requests, if layers of the model have one."""
        self.adapters: RowAdapters | None = None
        """LoRA adapters of rows; None without --enable-lora."""
        self.images: RowImages | None = None
        """Images of rows; None: the model has no vision tower."""
        self.image_ends: Tensor | None = None
        """`RowImages.ends` on the device, for steps whose lengths the host does not know; None: not needed."""
        self.history = TokenBuffer(max_rows, width, stream) if num_drafts else None
        self.sampling = SamplingState(max_rows, vocab_size)
        self.edits = LogitsProcessors(vocab_size, self.slot_table, stream)
        self.slot_tokens: SlotTokens | None = None
        """Token ids by KV slot, for logits processors; None until the size of the KV pool is known."""
        self.logprobs: dict[int, LogprobSpec] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.returns_positions: set[int] = set()

    @property
    def width(self) -> int:
        """Columns of the slot table."""
        return self.slot_table.shape[1]

    def apply(self, finished: Sequence[int], new_rows: Sequence[NewRow], writes: Sequence[RowWrite]) -> None:
        """Removes finished rows, adds new ones, then applies row writes: the order of `StepPlan`."""
        self.changes += 1
        for row in finished:
            self._forget(row)
        for new in new_rows:
            self._enter(new)
        if self.adapters is not None:
            self.adapters.enter(new_rows)
        if new_rows and self.states is not None:
            self.states.enter(new_rows)
        for write in writes:
            if self.edits.reads_tokens[write.row]:
                self._move_tokens(write)
            self._point(write.row, write.start, write.slots)

    def keep_tokens(self, num_slots: int) -> None:
        """Allocates the token ids by KV slot, the dummy page included; once, at start."""
        self.slot_tokens = SlotTokens(num_slots, self._stream)

    def keep_images(self, images: RowImages) -> None:
        """Adds the images of rows; once, at start."""
        self.images = images
        if self.history is not None and images.has_axes:
            self.image_ends = torch.zeros(images.ends.shape, dtype=torch.int64, device=self._stream.device)

    def bound_windows(self, num_slots: int, page_size: int) -> None:
        """Gives windowed layers a pool and a table of their own; once, at start. `num_slots`: of the full pool."""
        self.windows = WindowTable(self.max_rows, self.width, num_slots, page_size, self._stream)

    def note_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Stores tokens [T] int64 of slots [T] int64 of a step. Does nothing if no row's tokens are read."""
        if self.edits.keeps_tokens:
            assert self.slot_tokens is not None
            self.slot_tokens.put(slots, tokens)

    def reserve(self, writes: Sequence[RowWrite]) -> None:
        """Writes the slots reserved for future tokens, in one write."""
        if not writes:
            return
        spans = ((write.row * self.width + write.start, len(write.slots)) for write in writes)
        flat = np.array([at for first, count in spans for at in range(first, first + count)])
        slots = np.array([slot for write in writes for slot in write.slots], dtype=np.int32)
        self._slots.put_from_host(flat, slots)
        if self.windows is not None:
            self.windows.write_from_host(flat, slots)

    def only_sample(self, plan_rows: Sequence[int], rows: np.ndarray) -> bool:
        """Whether these rows (the same twice) need their sampled tokens only: no log-probabilities, rows of positions,
        logits processors or adapters."""
        edits = self.edits
        if self.logprobs and not self.logprobs.keys().isdisjoint(plan_rows):
            return False
        if self.returns_positions and not self.returns_positions.isdisjoint(plan_rows):
            return False
        if self.adapters is not None and self.adapters.any(rows):
            return False
        return not (edits.active and edits.wanted[rows].any())

    def slots_at(self, flat: Tensor) -> Tensor:
        """slot_table.flat[flat[t]], flat [T] int64 -> [T] int64."""
        return self._slots.take(flat)

    def write_slots(self, flat: Tensor, slots: Tensor) -> None:
        """slot_table.flat[flat[t]] = slots[t]; flat [T] int64, slots [T] int32."""
        self._slots.put(flat, slots)
        if self.windows is not None:
            self.windows.write(flat, slots)

    def check_lengths(self, rows: Sequence[int] | np.ndarray, lengths: np.ndarray) -> None:
        """Raises ValueError if one of the rows, which grow to `lengths` tokens, exceeds the table's width."""
        if len(lengths) and int(lengths.max()) > self.width:
            row = rows[int(lengths.argmax())]
            raise ValueError(f"row {row} grows to {lengths.max()} tokens, its table has {self.width}")

    def last_tokens_of(self, rows: Tensor) -> Tensor:
        """The last sampled tokens [n] int64 of rows [n] int64."""
        return self._last_tokens.take(rows)

    def set_last_tokens(self, rows: Any, tokens: Any) -> None:
        """Sets the last sampled tokens [n] int64 >= 0 of rows [n] int64; tensors, or `DeviceStream.arrays`."""
        self._last_tokens.put(rows, tokens)

    def _enter(self, new: NewRow) -> None:
        if not 0 <= new.row < self.max_rows:
            raise ValueError(f"request {new.rid}: row {new.row} is outside the worker's {self.max_rows} rows")
        self._forget(new.row)
        if self.images is not None:
            new = self._enter_images(self.images, new)
        self._point(new.row, 0, new.slots)
        if self.history is not None:
            self.history.enter(new)
        self.sampling.enter(new)
        self.edits.enter(new)
        if new.sampling.reads_tokens and new.slots:
            assert self.slot_tokens is not None
            self.slot_tokens.put_from_host(new.slots, new.token_ids[: len(new.slots)])
        if new.returns_positions:
            self.returns_positions.add(new.row)
        if new.logprobs is not None:
            self.logprobs[new.row] = new.logprobs
            if new.logprobs.start is not None:
                prompt = new.token_ids[: new.num_prompt]
                self.prompt_logprobs[new.row] = PromptLogprobs(prompt, new.logprobs, len(new.slots))

    def _enter_images(self, images: RowImages, new: NewRow) -> NewRow:
        before = images.ends[new.row].copy()
        new = images.enter(new)
        if self.image_ends is not None and not np.array_equal(after := images.ends[new.row].copy(), before):
            self.image_ends[new.row].copy_(self._stream.from_array(after))
        return new

    def _forget(self, row: int) -> None:
        self.owners[row] += 1
        self.edits.forget(row)
        self.logprobs.pop(row, None)
        self.returns_positions.discard(row)
        self.prompt_logprobs.pop(row, None)

    def _move_tokens(self, write: RowWrite) -> None:
        """Copies the stored token ids of a row's old slots to the new slots, which hold the same tokens."""
        assert self.slot_tokens is not None
        old = self.slot_table[write.row, write.start : write.start + len(write.slots)].long()
        self.slot_tokens.move(old, self._stream.from_list(write.slots, torch.int64))

    def _point(self, row: int, start: int, slots: list[int]) -> None:
        if not slots:
            return
        if start + len(slots) > self.width:
            raise ValueError(f"row {row}: tokens up to {start + len(slots)} exceed the row's width {self.width}")
        values = self._stream.from_array(np.array(slots, dtype=np.int32))
        self.slot_table[row, start : start + len(slots)].copy_(values)
        if self.windows is not None:
            self.windows.point(row, start, values)
