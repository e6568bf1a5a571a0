"""Drafter of layers that fill in blocks (DFlash, DSpark): one forward yields all drafts of a request.

The block is the last token with mask tokens behind it, at the positions that the drafts get. Its keys and values are
written to the slots of these positions, and replaced when the tokens there have been computed by the target. A draft is
sampled as the target will sample at that position, with the same parameters and random numbers.

Legend: D rows with drafts, B tokens of a block, S drafts of each, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.models.block_head import BlockLayers
from moe_engine.models.markov_head import MarkovHead
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import NewRow
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafter import Computed
from moe_engine.worker.speculation.drafts import Drafts, DraftTask


class BlockDrafter:
    """The drafter of the module docstring; implements `Drafter`."""

    def __init__(self, layers: BlockLayers, batches: DraftBatches, sampler: Sampler) -> None:
        self.layers = layers
        self._batches = batches
        self._sampler = sampler

    @property
    def kv(self) -> Sequence[Any]:
        """The KV cache of every layer, the target's and the head's."""
        return self._batches.kv

    @property
    def attention(self) -> MLABackend | GQABackend:
        """Attention backend of the head."""
        return self._batches.attention

    def enter(self, new: NewRow) -> None:
        return None

    def skip(self, rows: np.ndarray) -> None:
        return None

    def join(self, sizes: Sequence[StepSizes]) -> None:
        return None

    def update_cache(self, computed: Computed) -> None:
        self.layers.remember(computed.hidden, computed.forward)

    def propose(self, task: DraftTask) -> Drafts:
        block = self.layers.block
        count = block.tokens(task.depth)
        ids = task.roots.new_full((len(task.rows), count), block.mask_id)
        ids[:, 0] = task.roots
        counts = np.full(len(task.rows), count)
        everyone = np.full(len(ids) * count, _all_of(count), dtype=np.int64) if self.layers.visible else None
        _, forward = self._batches.runs(task.rows, task.lengths, counts, ids.flatten(), visible=everyone)
        v = self.layers.forward(forward).unflatten(0, (-1, count))[:, count - task.depth :]  # [D, S, E]
        if self.layers.markov is None:
            tokens = self._draw_at_once(task, v)
        else:
            tokens = self._draw_in_turn(task, v, self.layers.markov)
        return Drafts(torch.cat((task.roots[:, None], tokens), 1))

    def _draw_at_once(self, task: DraftTask, v: Tensor) -> Tensor:
        """Drafts [D, S] that do not depend on each other."""
        rows, steps = np.repeat(task.rows, task.depth), np.tile(np.arange(task.depth), len(task.rows))
        lengths = np.repeat(task.lengths + 1, task.depth) + steps
        sampled = SampledRows(rows, lengths, task.rows_device.repeat_interleave(task.depth))
        drawn = self._sampler.draw(self.layers.logits, v.flatten(0, 1), sampled)
        return drawn.clamp_min(0).view(-1, task.depth)

    def _draw_in_turn(self, task: DraftTask, v: Tensor, markov: MarkovHead) -> Tensor:
        """Drafts [D, S] of which each depends on the one before."""
        most = max(1, self._sampler.passes.rows_at_once // (task.depth + 2))  # a bias, in two formats, is as large
        out = []
        for begin in range(0, len(task.rows), most):
            part = slice(begin, min(begin + most, len(task.rows)))
            sampled = SampledRows(task.rows, task.lengths + 1, task.rows_device).part(part)
            logits = self.layers.logits(v[part].flatten(0, 1)).unflatten(0, (-1, task.depth))
            tokens, state = [task.roots[part]], markov.first_state(len(sampled.rows))
            for step in range(task.depth):
                bias, state = markov.bias(tokens[-1], v[part, step], state)
                at = replace(sampled, lengths=sampled.lengths + step)
                tokens.append(self._sampler.sample(bias.add_(logits[:, step]), at).clamp_min(0))
            out.append(torch.stack(tokens[1:], 1))
        return torch.cat(out)


def _all_of(count: int) -> int:
    """A mask of `count` tokens as int64."""
    return -1 if count == 64 else (1 << count) - 1
