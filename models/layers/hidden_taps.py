"""Hidden states of some layers, which draft layers read in addition to the model's result.

A tap copies the residual stream after a given number of layers. Layers add to one tensor in place, so the copy is the
only work, and a decoder without taps, or with taps that are off, does none.

Legend: T tokens, D hidden, K taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from moe_engine.models.batch import ForwardBatch


class HiddenTaps:
    """The taps of one decoder.

    Args:
        after: the numbers of layers after which the stream is copied, ascending; 0: the embedding.
        num_streams: of a residual of several streams of `width` channels the mean is copied; 0: the residual itself is.
        scale: see `ModelConfig.residual_scale`.

    Attributes:
        active: whether a forward copies.
    """

    def __init__(self, after: Sequence[int], num_streams: int = 0, width: int = 0, scale: float = 1.0) -> None:
        self._num_streams, self._width, self._scale = num_streams, width, scale
        self._places = {count: place for place, count in enumerate(after)}
        self.active = False
        self._states: Tensor | None = None

    def during(self, forward: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> Tensor:
        """A forward with active taps; `take` returns its states."""
        self.active = True
        try:
            return forward(batch)
        finally:
            self.active = False

    def begin(self, stream: Tensor) -> None:
        """Starts a forward with this stream [T, D]."""
        self._stream, width = stream, self._width or stream.shape[1]
        self._states = stream.new_empty(stream.shape[0], len(self._places) * width)

    def copy(self, count: int, layers: Sequence[Any], residual: Tensor, batch: ForwardBatch) -> None:
        """Copies the stream [T, D] after `count` layers, if there is a tap. Collective in an attention
        group whose ranks keep different rows of the stream."""
        place = self._places.get(count)
        if place is None:
            return
        assert self._states is not None
        whole = layers[count - 1].whole_stream(residual, batch) if count else self._stream
        if self._num_streams:
            whole = whole[:, : self._num_streams * self._width].unflatten(1, (self._num_streams, -1)).mean(1)
        width = whole.shape[1]
        self._states[:, place * width : (place + 1) * width].copy_(whole if self._scale == 1.0 else whole * self._scale)

    def take(self) -> Tensor:
        """The states [T, K * D] of the last forward, side by side in the order of the layers; once."""
        states, self._states = self._states, None
        assert states is not None, "no forward with active taps before"
        return states

    def put(self, states: Tensor) -> None:
        """Sets what `take` returns, for a forward that a CUDA graph has run."""
        self._states = states
