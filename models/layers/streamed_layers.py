"""Decoder layers whose weights wait in host memory (``--cpu-offload-gb``).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.kernels.weight_stream import WeightStream
from moe_engine.models.footprint import held_bytes, weights_of

LayerCall = Callable[..., Any]
"""`DecoderLayer.forward`."""


class StreamedLayers:
    """The calls of a decoder's layers. Norms between layers stay on the device.

    Args:
        stream: None: all weights stay on the device.
    """

    def __init__(self, stream: WeightStream | None) -> None:
        self._stream = stream
        self._places: dict[int, int] = {}
        self._modules: list[Any] = []

    def take(self, index: int, layer: Any) -> None:
        """Moves the weights of a layer that has just been loaded to host memory, if it is streamed.

        Raises:
            ConfigError: a kernel keeps them in a form of its own.
        """
        stream = self._stream
        if stream is None or index not in stream.layers:
            return
        try:
            tensors = [*weights_of(layer.attention), *weights_of(layer.feed_forward)]
        except TypeError as error:
            raise ConfigError(f"--cpu-offload-gb: layer {index}: {error}; leave it out") from None
        if any(stream.owns(tensor) for tensor in tensors):
            raise ConfigError(f"--cpu-offload-gb: layer {index} shares weights with another layer; leave it out")
        self._places[index] = stream.add(tensors)
        self._modules += [layer.attention, layer.feed_forward]

    def calls(self, layers: Iterable[Any]) -> list[LayerCall]:
        """The forward of each layer: with a stream the first one starts a pass.

        Raises:
            ConfigError: a layer on the device shares weights with a streamed one.
        """
        stream, calls = self._stream, []
        if stream is None:
            return [layer.forward for layer in layers]
        for index, layer in enumerate(layers):
            place = self._places.get(index)
            if place is None and any(map(stream.owns, weights_of(layer))):
                raise ConfigError(f"--cpu-offload-gb: layer {index} shares weights with a streamed layer; leave it out")
            call = layer.forward if place is None else _streamed(stream, place, layer.forward)
            calls.append(_beginning(stream, call) if index == 0 else call)
        return calls

    def device_bytes(self, decoder: Any) -> int:
        """Bytes of weights and tables on the device, in the kernels' layouts."""
        shared = [decoder.parallel, *self._modules]
        if self._stream is None:
            return held_bytes(decoder, shared=shared)
        return held_bytes(decoder, shared=shared) + held_bytes(decoder.rotary_tables) + self._stream.buffer_bytes


def _beginning(stream: WeightStream, call: LayerCall) -> LayerCall:
    def begin(hidden: Activation, residual: Tensor, *more: Any) -> Any:
        stream.begin()
        return call(hidden, residual, *more)

    return begin


def _streamed(stream: WeightStream, place: int, call: LayerCall) -> LayerCall:
    def forward(hidden: Activation, residual: Tensor, *more: Any) -> Any:
        stream.enter(place)
        hidden = call(hidden, residual, *more)
        stream.leave(place)
        return hidden

    return forward
