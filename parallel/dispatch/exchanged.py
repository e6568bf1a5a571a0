"""A dispatcher composed of an exchange between ranks and a layout on this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.parallel.dispatch.buffers import Slots
from moe_engine.parallel.dispatch.expert_ids import check_choices
from moe_engine.parallel.dispatch.payload import encode
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Exchange, Layout, Tokens


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
        checks: rejects invalid ids before they are sent; synchronizes with the device, so None in low latency.
    """

    def __init__(self, shape: DispatchShape, exchange: Exchange, layout: Layout, checks: Permutation | None) -> None:
        self._shape = shape
        self._exchange = exchange
        self._layout = layout
        self._checks = checks
        self._slots = Slots()
        self.takes_rows = shape.fp8

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, ExchangedHandle]:
        if len(x) > self._shape.max_tokens:
            raise ValueError(f"{len(x)} tokens in one dispatch; this dispatcher was made for {self._shape.max_tokens}")
        if self._checks is not None:
            check_choices(self._checks, topk_ids, self._shape.num_experts)
        slot = self._slots.take()
        sent = encode(x, topk_ids, topk_weights, self._shape.fp8, format)
        arrived, handle = self._exchange.deliver(sent, slot)
        batch, positions = self._layout.expand(arrived, format, slot)
        if batch.layout == "padded":
            batch = replace(batch, mean_rows=self._shape.mean_rows(len(x)))
        return batch, ExchangedHandle(slot, topk_weights, arrived.weights, positions, handle)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: ExchangedHandle) -> Tensor:
        if topk_weights is not handle.topk_weights:
            raise ValueError("combine needs the topk_weights passed to dispatch: they were already sent")
        self._slots.release(handle.slot)
        partial = self._layout.reduce(rows, handle.positions, handle.weights)
        return self._exchange.collect(partial, handle.handle)


class LocalExchange:
    """The exchange of a single rank with all experts: the reference for layouts and multi-rank tests."""

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, None]:
        return tokens, None

    def collect(self, partial: Tensor, handle: None) -> Tensor:
        return partial
