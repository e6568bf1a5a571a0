"""What the MTP layers of all models share: one decoder layer over a join of the next tokens and their hidden states.

Legend: T tokens, S rows, D hidden, W width of the hidden states (`ModelConfig.draft_state_width`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_engine.kernels.decoder.drafting import DraftLevel
from moe_engine.models.layers.compiled_layer import CompiledLayer
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.decoder_layer import DecoderLayer
from moe_engine.models.layers.embedding import Head
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.gated_streams import GatedStreamNorm
from moe_engine.models.layers.residual.streams import StreamNorm
from moe_engine.models.layers.sharded_layer import ShardedLayer

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce


class JoiningLayer(ABC):
    """embedding [T, D] of the next tokens, hidden [T, W] -> v [T, W]."""

    _input_norm: RMSNorm
    _decoder: DecoderLayer | CompiledLayer | ShardedLayer
    head: Head | None = None
    """The layer's own LM head; None: it uses the model's."""

    @abstractmethod
    def _join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """The residual before the decoder layer."""

    @abstractmethod
    def modules(self, model: Decoder, layer_index: int) -> Iterator[Reloadable]:
        """As `Decoder.modules`."""

    @property
    def feed_forward(self) -> Any:
        return self._decoder.feed_forward

    def forward(self, embedding: Tensor, hidden: Tensor, *attention_args: Any) -> Tensor:
        residual = self._join(embedding, hidden)
        return self._decoder.forward(self._input_norm(residual), residual, *attention_args)

    def remember(self, embedding: Tensor, hidden: Tensor, *remember_args: Any) -> None:
        self._decoder.attention.remember(self._input_norm(self._join(embedding, hidden)), *remember_args)

    def output(self, v: Tensor) -> Tensor:
        """v [S, W] -> the head's input [S, D]."""
        return v

    def level(self) -> DraftLevel | None:
        """The layer's weights, for draft chains in one call; None if its modules have no calls."""
        return None


class ResidualOnly:
    """Replaces the norm after a layer: adds the result, and returns the residual or its streams.

    Args:
        norm: of the head's input.
    """

    adds_rows = adds_pairs = False

    def __init__(self, norm: RMSNorm | StreamNorm | GatedStreamNorm) -> None:
        self._norm = norm

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """See `RMSNorm`."""
        self._norm.sum_over(all_reduce)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Tensor:
        assert other is None
        return self._norm.write(x, residual)
