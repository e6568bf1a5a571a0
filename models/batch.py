"""What a model is given each step, and what every model offers. Models never see a request.

Legend: T tokens in the step, S rows whose logits are needed, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch
from moe_engine.parallel.step_sizes import StepSizes


@dataclass(frozen=True)
class ForwardBatch:
    """One step, read-only. Tokens of `attention.decode` come first, then those of `attention.prefill`.

    `kv[layer]` is the cache of a layer: one tensor [num_slots, C+P] for MLA, a pair [num_slots, G, Dh] (keys, values)
    for GQA; with FP8 the last dimension is that of `attention.kv_format`'s rows. `attention_plan` is what the attention
    backend's `plan` returned for this step. `sizes` tells what the other ranks have in this step; needed with DP
    attention, also by a rank without tokens.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where this step's KV goes
    logits_rows: Tensor  # [S] int64: tokens whose logits are needed
    attention: AttentionBatch
    attention_plan: Any
    kv: Sequence[Any]
    sizes: StepSizes | None = None

    @classmethod
    def nothing(cls, kv: Sequence[Any], sizes: StepSizes, device: torch.device) -> ForwardBatch:
        """A forward of other ranks, in which this one has no tokens and takes part."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(none, none, none, none, AttentionBatch(None, None), None, kv, sizes)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@runtime_checkable
class SupportsTBO(Protocol):
    """A model on many ranks that can run parts of a step side by side."""

    def forward_overlapped(self, batches: Sequence[ForwardBatch]) -> list[Tensor]:
        """`Model.forward` of each part; earlier parts go first in every layer. Collective."""


class Model(Protocol):
    """A language model of the engine. Built from its config and a weight reader; see `models.registry`.

    On many ranks both calls are collective: all ranks of the model call them in the same order, also without tokens.
    """

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm, [T, D]."""

    def logits(self, hidden: Tensor, sizes: StepSizes | None = None) -> Tensor:
        """hidden [S, D] -> [S, V] float32. `sizes` as in `ForwardBatch`, with S of every attention group."""
