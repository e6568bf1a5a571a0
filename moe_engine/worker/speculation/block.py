"""Drafter of layers that fill in blocks (DFlash, DSpark): one forward yields all drafts of a request.

The block is the last token with mask tokens after it, at the positions that the drafts get. Its keys and values are
written to the slots of these positions, and replaced when the tokens there have been computed by the target. A draft is
sampled as the target will sample at that position, with the same parameters and random numbers.

Legend: D rows with drafts, B tokens of a block, S drafts of each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.drafts.block_head import BlockLayers
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Computed, Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask, target_ids


class BlockDrafter(Drafter):
    """The drafter of the module docstring; implements `Drafter`."""

    def __init__(self, layers: BlockLayers, batches: DraftBatches, sampler: Sampler, stream: DeviceStream) -> None:
        self.layers = layers
        self.batches = batches
        self._sampler = sampler
        self._stream = stream

    def forwards(self, num_drafting: int, depth: int) -> Sequence[tuple[int, int]]:
        """The forward of the blocks, then passes of the LM head."""
        if not num_drafting or not depth:
            return []
        passes = [(0, depth * (part.stop - part.start)) for part in self._passes(num_drafting, depth)]
        return [(num_drafting * self.layers.block.tokens(depth), 0), *passes]

    def join(self, sizes: Sequence[StepSizes]) -> None:
        if sizes:
            v = self.layers.forward(ForwardBatch.nothing(self.batches.kv, sizes[0], self._stream.device))
            self._join_passes(v, sizes[1:])

    def update_cache(self, computed: Computed) -> None:
        self.layers.remember(computed.hidden, computed.forward)

    def propose(self, task: DraftTask) -> Drafts:
        block = self.layers.block
        count = block.tokens(task.depth)
        ids = task.roots.new_full((len(task.rows), count), block.mask_id)
        ids[:, 0] = task.roots
        counts = np.full(len(task.rows), count)
        everyone = np.full(len(ids) * count, all_of(count), dtype=np.int64) if self.layers.visible else None
        _, forward = self.batches.runs(task.rows, task.lengths, counts, ids.flatten(), visible=everyone)
        if task.sizes:
            forward = replace(forward, sizes=task.sizes[0])
        v = self.layers.forward(forward).unflatten(0, (-1, count))[:, count - task.depth :]  # [D, S, E]
        out, sizes = [], task.sizes[1:]
        for i, part in enumerate(self._passes(len(task.rows), task.depth)):
            logits = self.layers.logits(v[part].flatten(0, 1), sizes[i] if sizes else None)
            out.append(self._draw(task, part, v[part], logits.unflatten(0, (-1, task.depth))))
        self._join_passes(v[:0, 0], sizes[len(out) :])
        return Drafts(torch.cat((task.roots[:, None], torch.cat(out)), 1))

    def _passes(self, num_rows: int, depth: int) -> list[slice]:
        """Rows whose logits fit into the memory of a pass; a bias, in two formats, is as large as those of a draft."""
        most = max(1, self._sampler.passes.rows_at_once // (depth + 2))
        return [slice(begin, min(begin + most, num_rows)) for begin in range(0, num_rows, most)]

    def _join_passes(self, nothing: Tensor, sizes: Sequence[StepSizes]) -> None:
        for each in sizes:
            self.layers.logits(nothing, each)

    def _draw(self, task: DraftTask, part: slice, v: Tensor, logits: Tensor) -> Tensor:
        """Drafts [n, S] of a part of the rows. v: [n, S, E]; logits: [n, S, V]."""
        rows, lengths, device = task.rows[part], task.lengths[part] + 1, task.rows_device[part]
        depth, markov = task.depth, self.layers.markov
        if markov is None:  # the drafts of a block do not depend on each other
            each = np.repeat(lengths, depth) + np.tile(np.arange(depth), len(rows))
            sampled = SampledRows(np.repeat(rows, depth), each, device.repeat_interleave(depth))
            return target_ids(self.layers.ids, self._sampler.sample(logits.flatten(0, 1), sampled)).view(-1, depth)
        tokens, state = [task.roots[part]], markov.first_state(len(rows))
        for step in range(depth):
            bias, state = markov.bias(tokens[-1], v[:, step], state)
            drawn = self._sampler.sample(bias.add_(logits[:, step]), SampledRows(rows, lengths + step, device))
            tokens.append(target_ids(self.layers.ids, drawn))
        return torch.stack(tokens[1:], 1)


def all_of(count: int) -> int:
    """A mask of `count` tokens as int64."""
    return -1 if count == 64 else (1 << count) - 1
