"""RMSNorm, alone, fused with the residual stream, and with quantization for its consumers; LayerNorm. Weights are kept
in float32.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.kernels.ops.layer_norm import add_layer_norm
from moe_engine.kernels.ops.protocol import AddNormRoute, Ops
from moe_engine.kernels.ops.streams import MixNormStreams, StreamWeights
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat, common_format
from moe_engine.models.weights import WeightSource

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce
    from moe_engine.parallel.dispatch.protocol import NormedSum


def summed(all_reduce: CustomAllReduce | None, x: Tensor, residual: Tensor) -> Tensor:
    """x, or the sum of the ranks' x; an idle attention group sums nothing."""
    return x if all_reduce is None or not len(residual) else all_reduce.sum(x)


class RMSNorm:
    """x * rsqrt(mean(x^2) + eps) * weight. plus: added to the stored weights; they are multiplied by `factor` then."""

    def __init__(
        self, ops: Ops, reader: WeightSource, prefix: str, width: int, eps: float, plus: float = 0.0,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        self.weight = reader.tensor(prefix + ".weight", (width,), dtype=torch.float32)
        if plus and not reader.made_up:
            self.weight += plus
        if factor != 1.0 and not reader.made_up:
            self.weight *= factor
        self.eps = eps
        self._quantized_norms = ops.capabilities.quantized_norms
        self._rms_norm: Callable[..., Any] = ops.rms_norm
        self._add_rms_norm: Callable[..., Any] = ops.add_rms_norm
        self._format = UNQUANTIZED
        self._plain: Callable[..., Any] = ops.add_rms_norm
        self._all_reduce: CustomAllReduce | None = None
        self._add_pair: Callable[..., Any] | None = ops.capabilities.add_pair_rms_norm
        self._add_rows: Callable[..., Any] | None = ops.capabilities.add_rows_rms_norm
        self._requests = ops.capabilities.norms_ahead
        self._ahead: Callable[[], dict[str, Tensor]] = dict  # a call: the tensor is no weight of this module

    def feed(self, *readers: ActivationFormat) -> None:
        """Enables `QuantizedActivation` results if any consumer reads rows and this device's kernels produce them; call
        only if all consumers of this norm accept them (`as_format`)."""
        format = common_format(*readers)
        norms = self._quantized_norms
        if format.rows and norms is not None:
            self._format = format
            self._rms_norm, self._plain = partial(norms.rms_norm, format), partial(norms.add_rms_norm, format)
            self._add_pair = partial(norms.add_pair_rms_norm, format)
            self._add_rows = partial(norms.add_rows_rms_norm, format)
            self._choose_add()

    def precedes(self, weight: Tensor | None) -> None:
        """The norm's launch may bring `weight` to a cache, contiguous, which is read next."""
        if weight is not None and self._requests and self._all_reduce is None:
            self._ahead = lambda: {"ahead": weight}

    def keep_unquantized(self) -> None:
        """Results also have the unquantized values from now on."""
        if self._format.rows:
            self.feed(self._format, UNQUANTIZED)

    def sum_over(self, all_reduce: CustomAllReduce) -> None:
        """From now on `add` and `add_rows` get partial sums of the ranks' rows, and sum them in the same launch."""
        self._all_reduce, self._ahead = all_reduce, dict
        self._choose_add()

    def _choose_add(self) -> None:
        self._add_rms_norm = self._plain
        if self._all_reduce is not None:
            self._add_rms_norm = partial(self._all_reduce.add_rms_norm, self._plain, self._format)
            self._add_rows = partial(self._all_reduce.add_rows_rms_norm, self._plain, self._format)

    def __call__(self, x: Tensor) -> Any:
        """x [T, D] -> its norm, a Tensor unless its consumers are FP8 products."""
        return self._rms_norm(x, self.weight, self.eps, **self._ahead())

    def stream(self, residual: Tensor) -> Tensor:
        """The residual stream [T, D], which the norm reads."""
        return residual

    @property
    def width(self) -> int:
        """Channels of a result."""
        return len(self.weight)

    @property
    def fuses_router(self) -> bool:
        """True if `add_with` is supported."""
        return self._all_reduce is None

    def add_with(self, fused: AddNormRoute, x: Tensor, residual: Tensor, *router: Any) -> tuple[Any, Tensor, Tensor]:
        """`add`, and the router of its result by the same call; router: the arguments of `fused` after eps."""
        return fused(self._format, x, residual, self.weight, self.eps, *router)

    def of_mixed(self, fused: MixNormStreams, x: Tensor | None, residual: Tensor, weights: StreamWeights) -> Any:
        """The norm of a sum of streams, by the call that computes the sum."""
        return fused(x, residual, weights, self._format, self.weight, self.eps)

    @property
    def adds_pairs(self) -> bool:
        """True if `add` takes a second addend."""
        return self._add_pair is not None

    def add_sum(self, sum: NormedSum, residual: Tensor, other: Tensor | None = None) -> Any:
        """`add` of a sum over ranks, by the launch that computes it."""
        return sum(self._format, other, residual, self.weight, self.eps)

    @property
    def adds_rows(self) -> bool:
        """True if `add_rows` is supported."""
        return self._add_rows is not None

    def add_rows(self, rows: ExpertRows, residual: Tensor) -> Any:
        """`add` of the experts' sum, if it `adds_rows`."""
        assert self._add_rows is not None
        return self._add_rows(rows, residual, self.weight, self.eps, **self._ahead())

    def write(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, D] += x in place; returns it."""
        self.add(x, residual)
        return residual

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        """residual [T, D] += x (+ other, if it `adds_pairs`) in place; returns the norm of the sum, see `__call__`."""
        if other is not None:
            assert self._add_pair is not None
            return self._add_pair(x, other, residual, self.weight, self.eps, **self._ahead())
        return self._add_rms_norm(x, residual, self.weight, self.eps, **self._ahead())


class LayerNorm(RMSNorm):
    """(x - mean(x)) * rsqrt(variance(x) + eps) * weight, + bias if it has one. Consumers quantize its results
    themselves, and launches of other parts do not compute it."""

    fuses_router = adds_pairs = adds_rows = False

    def __init__(
        self, ops: Ops, reader: WeightSource, prefix: str, width: int, eps: float, has_bias: bool = True
    ) -> None:
        super().__init__(ops, reader, prefix, width, eps)
        self.bias = reader.tensor(prefix + ".bias", (width,), dtype=torch.float32) if has_bias else None
        self._run = ops.capabilities.layer_norm or add_layer_norm

    def feed(self, *readers: ActivationFormat) -> None:
        """Nothing: results are tensors."""

    def __call__(self, x: Tensor) -> Any:
        return self._run(None, x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> Any:
        assert other is None
        return self._run(summed(self._all_reduce, x, residual), residual, self.weight, self.bias, self.eps)
