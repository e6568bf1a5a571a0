"""All decoder layers in one call: what an attention backend can offer beside its two forms.

Legend: T tokens, D hidden, V vocabulary, L layers, K experts a token.
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
    """A decoder layer: attention and one kind of feed-forward, each followed by the norm of what is added up so far."""

    attention: Any  # what `FusedMLA.fuse` gave
    post_norm: Tensor  # [D] float32
    next_norm: Tensor  # [D] float32: the next layer's input norm, or the final one
    eps: float
    experts: Any | None = None  # what `FusedMoE.fuse` gave
    mlp: tuple[PreparedLinear, PreparedLinear] | None = (
        None  # gate and up [2I, D], down [D, I], as `FusedMLP` runs them
    )


@runtime_checkable
class FusedStack(Protocol):
    """A backend that runs a whole decoder in one call, where weights are as it wants them."""

    max_fused_tokens: int
    """Tokens of a step up to which that gains anything."""

    def fuse_stack(self, embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]) -> Any | None:
        """What `run_stack` takes; None where these weights cannot be run so. embedding [V, D], first_norm [D]."""

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
        """Tokens -> hidden states after the final norm, [T, D], with the bits of the separate calls.

        Args:
            ids, positions, slots: [T] int64; all tokens belong to `queries`, attention is absorbed.
            caches: of the L layers (more may follow), [num_slots, C+P]; the tokens' rows are written first.
            choices: of the L layers; [T, K] int32 that get what the router chose, or None.
        """
