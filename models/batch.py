"""Model input of a step, and the model interface. Models never see a request.

Legend: T tokens in the step, S rows with logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.lora.protocol import AdapterTokens
from moe_engine.kernels.queries import AttentionBatch, SharedRun
from moe_engine.parallel.step_sizes import StepSizes


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Slots of a step in the pool of windowed layers, whose KV is bounded by the window."""

    slots: Tensor  # [T] int64
    table: Tensor  # [max_rows, max_context] int32, instead of `PagedQueries.slot_table`


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Image tokens of a step: their numbers in the step, what the vision tower computed for them, and their positions
    by axis (frame, row, column)."""

    tokens: Tensor  # [n] int64
    rows: Tensor  # [n, VisionConfig.row_width]
    axes: Tensor  # [3, n] int64
    before: int = 0
    """Image tokens of the other half before this one (two-batch overlap): both halves' positions are in one table."""
    spans: Sequence[tuple[Sequence[int], int]] = ()
    """Image by image, if its tokens see each other both ways: their numbers in the step, and the place in the sequence
    after the image's last token."""


@dataclass(frozen=True, slots=True)
class PoolStarts:
    """Where pools begin whose keys are rotated as their first token: the place of each token of a step in its sequence,
    and the position by axis (as in `ImageRows`) of the first token of its pool."""

    places: Tensor  # [T] int64
    axes: Tensor  # [T, 3] int64


@dataclass(frozen=True, slots=True)
class ExpandedContext:
    """Keys and values that MLA expands from context tokens of a step's prompts, kept for other steps.

    `layers`: keys and values [S, H, N+V] and rotary channels of the keys [S, P] by layer index. With `run` its first
    `length` tokens are known; without, the step has one expanded prompt, and the layers store its context.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    run: SharedRun | None = None
    length: int = 0


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """What the routers of a rank read of its tokens, in addition to their hidden states."""

    ids: Tensor  # [T] int64: token ids, for layers that choose experts by them
    real: Tensor | None = None  # [T] int32, as in `ForwardBatch`
    images: Tensor | None = None  # [T] bool: image tokens; None: there are none, or no router asks
    own: slice | None = None  # this rank's tokens among those of all ranks; None: on one rank


@dataclass(frozen=True)
class ForwardBatch:
    """One step, read-only. Tokens of `attention.decode` come first, then those of `attention.prefill`.

    `kv[layer]` is the cache of a layer: one tensor [num_slots, C+P] for MLA (with index keys a pair, the second
    [num_slots, 1, I]), a pair [num_slots, G, Dh] (keys, values) for GQA; with FP8 the last dimension is a row of
    `attention.kv_format`; for a layer with a state the tensors of its parts, see `state`. `attention_plan` is the
    result of the attention backend's `plan` for this step. `sizes` are all ranks' token counts in this step; needed
    with DP attention, also by a rank without tokens. With `windows` the caches of windowed layers have slots of their
    own. `real`: 0 for tokens that pad a captured step, which choose no expert; None: all are real. `adapters`: LoRA
    adapters of the tokens; None: none has one. `images`: image tokens, whose `input_ids` are placeholders; None: there
    are none. `next_images`: in a draft extend, the image tokens among those that follow each token. `pool_starts`:
    None: positions are places. `other_groups`: queries and plan of cache groups with another window than `attention`,
    by window, planned in advance; None: the model plans them. `expanded`: keys and values of prompts that are known or
    to be kept; None: neither. `rank_tokens`: the tokens that this rank of many routes, set at the start of a forward;
    None: those of the batch.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: KV slots of this step's tokens
    logits_rows: Tensor  # [S] int64: tokens whose logits are needed
    attention: AttentionBatch
    attention_plan: Any
    kv: Sequence[Any]
    sizes: StepSizes | None = None
    windows: WindowSlots | None = None
    real: Tensor | None = None  # [T] int32
    adapters: AdapterTokens | None = None
    stored_states: StateRuns | None = None
    images: ImageRows | None = None
    next_images: ImageRows | None = None
    pool_starts: PoolStarts | None = None
    other_groups: Mapping[int | None, tuple[AttentionBatch, Any]] | None = None
    expanded: ExpandedContext | None = None
    rank_tokens: RoutedTokens | None = None

    @classmethod
    def nothing(cls, kv: Sequence[Any], sizes: StepSizes, device: torch.device) -> ForwardBatch:
        """An empty batch, with which an idle rank takes part in a forward of other ranks."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(none, none, none, none, AttentionBatch(None, None), None, kv, sizes)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def places(self) -> Tensor:
        """The place of each token in its sequence, [T] int64; after an image with axes, positions are smaller."""
        return self.positions if self.pool_starts is None else self.pool_starts.places

    @cached_property
    def routed(self) -> RoutedTokens:
        """The tokens that this rank routes."""
        return self.rank_tokens or RoutedTokens(self.input_ids, self.real, self.is_image)

    @cached_property
    def is_image(self) -> Tensor | None:
        """Which tokens are image tokens, [T] bool; None: there are none."""
        if self.images is None:
            return None
        found = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.positions.device)
        return found.index_fill_(0, self.images.tokens, True)

    @cached_property
    def state_rows(self) -> Tensor:
        """The request row of each sequence [R] int64, in the order of the step's tokens: its index in state tensors.
        Padding of a captured step has the row of no request."""
        if self.stored_states is not None:
            return self.stored_states.reads
        groups = (self.attention.decode, self.attention.prefill)
        rows = [queries.rows for queries in groups if queries is not None]
        return torch.cat(rows).long() if rows else self.slots[:0]

    @cached_property
    def sequence_lens(self) -> list[int]:
        """Tokens of each sequence in this step, as `state_rows`: a decode has 1, a prompt those of its chunk."""
        groups = (self.attention.decode, self.attention.prefill)
        return [count for queries in groups if queries is not None for count in queries.query_lens]

    @cached_property
    def state_runs(self) -> StateRuns:
        """The rows from which the step's sequences read states and in which they store them, for kernels.
        `stored_states` if other states are stored too."""
        if self.stored_states is not None:
            return self.stored_states
        return StateRuns.plain(self.sequence_lens, self.state_rows)

    def state(self, layer: int, part: int = 0) -> Tensor:
        """A part of the state of each sequence before this step's tokens, [R, *shape], new memory; zeros for a sequence
        that starts. `kv[layer][part]` [rows + 1, *shape] is the tensor itself; no request has its last row."""
        return self.kv[layer][part].index_select(0, self.state_rows)

    def set_state(self, layer: int, values: Tensor, part: int = 0) -> None:
        """Stores the part [R, *shape] of each sequence's state after this step's tokens."""
        self.kv[layer][part].index_copy_(0, self.state_rows, values)


class Model(Protocol):
    """A language model of the engine. Built from its config and a weight reader; see `models.registry`.

    On many ranks both calls are collective: all ranks make the same calls in the same order, also without tokens.
    """

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the final norm, [T, D]."""

    def logits(self, hidden: Tensor, sizes: StepSizes | None = None, out: Tensor | None = None) -> Tensor:
        """hidden [S, D] -> [S, V] float32. `sizes` as in `ForwardBatch`, with S of every attention group. `out`: memory
        for the result, contiguous; None: any memory. Logits that are the head's product itself may be asked for in
        its 16 bits."""
