"""Input and output of the batch builder: runs of tokens, and the tensors of a step.

Legend: R requests or runs of tokens, T tokens, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.lora.protocol import AdapterTokens
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.batch import ForwardBatch, PoolStarts, WindowSlots
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.worker.batch.row_images import StepImages
from moe_engine.worker.sampling.sampler import SampledRows


@dataclass(frozen=True)
class StepBatch:
    """A step's tensors, before the attention backend has planned.

    `logits_rows` index the step's tokens whose logits are sampled; `all_sampled`: these are all tokens, in order.
    `offsets[i]` is the first token of the plan's request i.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    logits_rows: Tensor  # [S] int64
    all_sampled: bool
    attention: AttentionBatch
    sampled: SampledRows
    offsets: np.ndarray  # [R] int64
    flat: Tensor  # [T] int64: the token's index into the flat slot table
    windows: WindowSlots | None = None
    adapters: AdapterTokens | None = None
    stored_states: StateRuns | None = None
    """Set if a step stores other states than those at its sequences' ends."""
    images: StepImages | None = None
    """Image tokens; the model runner adds them to the model's input (`worker.image_encoder`)."""

    pool_starts: PoolStarts | None = None

    def forward_batch(self, attention_plan: Any, kv: Sequence[Any], sizes: StepSizes | None = None) -> ForwardBatch:
        """The model's input, after the attention backend has planned."""
        return ForwardBatch(
            input_ids=self.input_ids,
            positions=self.positions,
            slots=self.slots,
            logits_rows=self.logits_rows,
            attention=self.attention,
            attention_plan=attention_plan,
            kv=kv,
            sizes=sizes,
            windows=self.windows,
            adapters=self.adapters,
            stored_states=self.stored_states,
            pool_starts=self.pool_starts,
        )


def concatenate(first: StepBatch, second: StepBatch) -> StepBatch:
    """Concatenates the outputs of two halves of a step; attention was planned for each."""
    shift = len(first.positions)
    return replace(
        first,
        logits_rows=torch.cat((first.logits_rows, second.logits_rows + shift)),
        all_sampled=first.all_sampled and second.all_sampled,
        sampled=SampledRows(
            np.concatenate((first.sampled.rows, second.sampled.rows)),
            np.concatenate((first.sampled.lengths, second.sampled.lengths)),
            torch.cat((first.sampled.rows_device, second.sampled.rows_device)),
        ),
    )


@dataclass(frozen=True)
class RaggedTokens:
    """Runs of adjacent tokens of some rows, decodes first: the input of a batch. Indices count tokens in the order of
    the runs.

    Ids are on the device for the first tokens and on the host for the rest; `slots` are given for the last tokens; the
    other slots are already in the slot table.
    """

    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64
    counts: np.ndarray  # [R] int64
    num_decodes: int
    device_ids: Tensor  # [n] int64
    host_ids: np.ndarray  # [T - n] int64
    slots: np.ndarray  # [m] int64
    sampled: np.ndarray  # [S] int64: indices of the tokens whose logits are needed
    positions: np.ndarray | None = None  # [T] int64, if they differ from the columns of the slot table (draft trees)
    stores: Mapping[int, Sequence[tuple[int, int]]] | None = None
    """By row: (tokens of its run, row in which the state after them is stored); otherwise the state after the last
    token, in its own row."""
    visible: np.ndarray | None = None  # [tokens of the decodes] int64, see PagedQueries
