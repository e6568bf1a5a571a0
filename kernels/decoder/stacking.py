"""All decoder layers in one call: an optional function of an attention backend.

Legend: T tokens, D hidden, V vocabulary, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moe_engine.kernels.attention.protocol import PagedQueries
from moe_engine.kernels.linear.protocol import PreparedLinear


@dataclass(frozen=True)
class StackedLayer:
    """A decoder layer: attention and one kind of feed-forward, each followed by the norm of the residual sum."""

    attention: Any  # from `FusedMLA.fuse`
    post_norm: Tensor  # [D] float32
    next_norm: Tensor  # [D] float32: the next layer's input norm, or the final norm
    eps: float
    experts: Any | None = None  # from `FusedMoE.fuse`
    mlp: tuple[PreparedLinear, PreparedLinear] | None = None  # gate and up [2I, D], down [D, I], see `FusedMLP`


@runtime_checkable
class FusedStack(Protocol):
    """A backend that runs a whole decoder in one call, for weights in the formats it supports."""

    max_fused_tokens: int
    """Max tokens per step for which the fused call is faster."""

    def fuse_stack(self, embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]) -> Any | None:
        """The handle for `run_stack`; None if these weights are not supported. embedding [V, D], first_norm [D]."""

    def run_stack(
        self,
        stack: Any,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[Tensor],
        queries: PagedQueries,
        plan: Any,
        choices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Tokens -> hidden states after the final norm, [T, D], bit-identical to the separate calls.

        Args:
            ids, positions, slots: [T] int64; all tokens belong to `queries`, attention is absorbed.
            caches: of the L layers (more may follow), [num_slots, C+P]; the tokens' rows are written first.
            choices: per layer, [T, K] int32 output of the router's choices, or None.
        """
