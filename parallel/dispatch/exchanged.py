"""A dispatcher composed of an exchange between ranks and a layout on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.parallel.dispatch.payload import encode
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Exchange, Layout
from moe_engine.parallel.dispatch.workspace import Slots

CheckChoices = Callable[[Tensor, int], None]
"""Type of `rows.check_choices`: physical ids [T, K] and the number of experts."""


@dataclass(frozen=True)
class ExchangedHandle:
    """Dispatch data for combine."""

    slot: int
    topk_weights: Tensor  # [T, K] of this rank's tokens
    weights: Tensor  # [N, K] of the received tokens
    positions: Tensor  # [N, K] rows of the batch
    handle: Any


class ExchangedDispatcher(Dispatcher):
    """`Dispatcher`: the exchange delivers tokens, the layout permutes them.

    Args:
        check: rejects invalid ids before they are sent; synchronises with the device, so None in low latency.
    """

    def __init__(self, shape: DispatchShape, exchange: Exchange, layout: Layout, check: CheckChoices | None) -> None:
        self._shape = shape
        self._exchange = exchange
        self._layout = layout
        self._check = check
        self._slots = Slots()
        self.takes_rows = shape.fp8

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, ExchangedHandle]:
        if len(x) > self._shape.max_tokens:
            raise ValueError(f"{len(x)} tokens in one dispatch; this dispatcher was made for {self._shape.max_tokens}")
        if self._check is not None:
            self._check(topk_ids, self._shape.num_experts)
        slot = self._slots.take()
        sent = encode(x, topk_ids, topk_weights, self._shape.fp8, format)
        arrived, handle = self._exchange.deliver(sent, slot)
        if format.rows and arrived.scales is not None:
            batch, positions = self._layout.expand_rows(arrived, slot)
        else:
            batch, positions = self._layout.expand(arrived, slot)
        return batch, ExchangedHandle(slot, topk_weights, arrived.weights, positions, handle)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: ExchangedHandle) -> Tensor:
        if topk_weights is not handle.topk_weights:
            raise ValueError("combine needs the topk_weights passed to dispatch: they were already sent")
        self._slots.release(handle.slot)
        partial = self._layout.reduce(rows, handle.positions, handle.weights)
        return self._exchange.collect(partial, handle.handle)
