"""Standalone drafter: a small draft model with the same vocabulary and its own KV cache over the same slots.

It runs no draft extend after a step. Before it drafts, it computes the row's tokens that are not in its KV cache: the
whole prompt at first, later the few tokens of the last steps.

In a captured step the host does not know the lengths. After a step with drafts the KV lacks at most the last draft
and the root, for that of accepted drafts is there: captured steps compute these two. Rows without drafts in their last
step catch up before, to their length, which is known then.

Legend: D rows with drafts, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.batch import Model
from moe_engine.models.step_memory import DRAFT_CATCH_UP, DRAFT_FEW
from moe_engine.types import NewRow
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.speculation.tree import NodeRun, grow


class StandaloneDrafter(Drafter):
    """The drafter of the module docstring; implements `Drafter`."""

    def __init__(
        self,
        model: Model,
        batches: DraftBatches,
        history: TokenBuffer,
        sampler: Sampler,
        stream: DeviceStream,
        rows: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.model = model
        self.windows = windows
        """Windows of the draft model's cache groups, the first group first."""
        self.batches = batches
        self._history = history
        self._sampler = sampler
        self._stream = stream
        self._num_cached = np.zeros(rows, dtype=np.int64)  # tokens of each row that are in the KV cache, at least
        self._drafted = np.zeros(rows, dtype=bool)  # the row's last step had drafts

    def enter(self, new: NewRow) -> None:
        self._num_cached[new.row] = 0
        self._drafted[new.row] = False

    def skip(self, rows: np.ndarray) -> None:
        self._drafted[rows] = False

    def propose(self, task: DraftTask) -> Drafts:
        hidden = self._draft_extend(task.rows, task.lengths + 1)  # [D, E], of the roots
        # KV of drafts may be rejected; the KV up to the root stays valid
        self._num_cached[task.rows] = task.lengths + 1
        self._drafted[task.rows] = True
        if task.topk > 1:
            expand = _LevelByLevel(self.model, self.batches, task)
            return grow(task, self.model.logits, hidden, expand, self._sampler)
        tokens = [task.roots]
        positions = task.lengths + np.arange(1, task.depth)[:, None]
        batches = self.batches.chain(task.rows, task.rows_device, positions)
        for step in range(task.depth):
            if step:
                batch = replace(next(batches), input_ids=tokens[-1])
                hidden = self.model.forward(batch)
            sampled = SampledRows(task.rows, task.lengths + 1 + step, task.rows_device)
            tokens.append(self._sampler.draw(self.model.logits, hidden, sampled).clamp_min(0))
        return Drafts(torch.stack(tokens, 1))

    def catch_up(self, rows: np.ndarray, starts: Sequence[int], num_drafts: int) -> None:
        """Before a captured step with `num_drafts` drafts of rows [D]: computes what it expects in the KV cache. No
        host wait.

        Args:
            starts: [D] lower bounds of the lengths; exact for rows whose last step had no drafts.
        """
        if not num_drafts:
            self.skip(rows)
            return
        lengths = np.array(starts, dtype=np.int64)
        behind = ~self._drafted[rows] & (self._num_cached[rows] < lengths - 1)
        if behind.any():
            self._draft_extend(rows[behind], lengths[behind] - 1)
        self._num_cached[rows] = lengths + 1
        self._drafted[rows] = True

    def _draft_extend(self, rows: np.ndarray, ends: np.ndarray) -> Tensor:
        """Draft extend: computes the tokens of rows [D] before `ends` that are not cached yet; hidden states [D, E] of
        the last."""
        starts = self._num_cached[rows]
        out: list[Tensor] = []
        for begin, end in _pieces(ends - starts):
            hidden = None
            for first, last in _chunks(starts[begin:end], ends[begin:end]):
                hidden = self._run(rows[begin:end], first, last - first)
            assert hidden is not None
            out.append(hidden)
        return torch.cat(out)

    def _run(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        batch, forward = self.batches.runs(
            rows,
            starts,
            counts,
            self._ids(rows, starts, counts),
            num_decodes=len(rows) if counts.max() <= DRAFT_FEW else 0,
        )
        return self.model.forward(forward).index_select(0, batch.logits_rows)

    def _ids(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        begins = np.cumsum(counts) - counts
        flat = np.repeat(rows * self._history.width + starts - begins, counts) + np.arange(int(counts.sum()))
        return self._history.at(self._stream.from_array(flat))


def _pieces(counts: np.ndarray) -> list[tuple[int, int]]:
    """Splits rows into groups of at most `DRAFT_CATCH_UP` tokens (at least one row)."""
    out, begin, total = [], 0, 0
    for i, count in enumerate(counts.tolist()):
        if i > begin and total + count > DRAFT_CATCH_UP:
            out.append((begin, i))
            begin, total = i, 0
        total += count
    return [*out, (begin, len(counts))]


def _chunks(starts: np.ndarray, ends: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """A group as a whole, or a single long row in chunks."""
    if len(starts) > 1 or int(ends[0] - starts[0]) <= DRAFT_CATCH_UP:
        return [(starts, ends)]
    cuts = [*range(int(starts[0]), int(ends[0]), DRAFT_CATCH_UP), int(ends[0])]
    return [(np.array([a]), np.array([b])) for a, b in pairwise(cuts)]


class _LevelByLevel:
    """Expands the nodes of a tree after the root, whose KV is cached."""

    def __init__(self, model: Model, batches: DraftBatches, task: DraftTask) -> None:
        self._model = model
        self._run = NodeRun(batches, task.rows, task.lengths + 1, task.lengths + 1)

    def __call__(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        ids, batch = self._run.add(tokens, parents)
        hidden = self._model.forward(batch).view(*ids.shape, -1)
        return hidden[:, -tokens.shape[1] :].flatten(0, 1)
