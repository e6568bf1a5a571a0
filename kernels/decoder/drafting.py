"""Draft chains in one call: inputs and results of a chain, and of the whole step around it.

Legend: R rows, D hidden, M MTP layers, S steps of a chain, N = S + 1 verified tokens, W entries of a row in tables of
all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moe_engine.kernels.decoder.layers import FusedMLA, FusedMoE
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.sampling.protocol import SamplingParameters


@dataclass(frozen=True)
class DraftLevel:
    """An MTP layer: z = project([embedding_norm(embedding) | hidden_norm(hidden)]), then a decoder layer on z."""

    embedding_norm: Tensor  # [D] float32, as are the other norms
    hidden_norm: Tensor
    project: PreparedLinear  # [D, 2D]
    input_norm: Tensor
    attention: FusedMLA
    post_norm: Tensor
    experts: FusedMoE
    final_norm: Tensor
    eps: float


@dataclass(frozen=True)
class ChainSteps:
    """Positions of each step of a chain. All rows attend to everything before their position."""

    levels: Sequence[int]  # [S]: which MTP layer runs
    positions: Tensor  # [S, R] int64
    slots: Tensor  # [S, R] int64
    context_lens: Tensor  # [S, R] int32, on the device
    queries: PagedQueries  # from any step: rows, slot table
    flat: Tensor  # [S, R] int64: the tokens' places in the flat slot table


class RowTables(NamedTuple):
    """Per-row state of a worker with speculation, in host memory."""

    slots: Tensor  # [max_rows, W] int32: slot of each position
    tokens: Tensor  # [max_rows, W] int32: up to the last token, at position lengths[row]
    lengths: Tensor  # [max_rows] int64
    last_tokens: Tensor  # [max_rows] int64
    states: Tensor  # [max_rows, D]: target hidden state at the position before the last token
    windows: Tensor  # [max_rows, W] int32: slots of layers with a bounded window; [0, W]: there are none
    image_ends: Tensor  # [max_rows, 5] int64, of prompts with images whose positions have axes: position minus place
    # after them, tokens, positions of the first token of the pool in which a prompt ends; [0, 5]: there are none


@dataclass(frozen=True)
class StepDraws:
    """Sampling of R rows in a step. A draft and its verification use the same random number."""

    of_rows: SamplingParameters  # of R draws
    of_tokens: SamplingParameters  # of R * N draws, grouped by row
    uniform: np.ndarray  # [N, R] float32


class VerifiedChains(NamedTuple):
    """Verification results for the chains of R rows."""

    starts: np.ndarray  # [R] int64: position of a row's last token before the step
    tokens: np.ndarray  # [R, N] int64: following tokens, the last one repeated; negative for invalid logits
    counts: np.ndarray  # [R] int64: number of new tokens
    seconds: np.ndarray  # [3] float64: of drafting, of the model, of the draft cache update
