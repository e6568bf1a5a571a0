"""Grouped matrix products of routed experts: out = down(silu(gate(x)) * up(x)) with each row's own expert.

Legend: T tokens, D hidden, I expert width, E (local) experts, K experts per token, M rows.
Dispatchers produce, and kernels accept, two batch layouts:
`grouped`: rows sorted by expert, contiguous, with counts per expert; `padded`: [E, capacity, D] with counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.quantization.protocol import ActivationFormat, BlockWeight


@dataclass(frozen=True)
class ExpertBatch:
    """Input rows of the experts. Router weights are applied later, by the dispatcher's combine.

    grouped: `x` [M, D], rows of expert e at offsets[e]:offsets[e+1]; `offsets` int32 [E+1] on the device.
    padded: `x` [E, capacity, D], the first counts[e] rows of expert e valid; `counts` int32 [E].

    If a kernel `ReadsRows`, rows dispatched in FP8 may stay quantized: `x` e4m3, `scales` float32 of its leading
    dimensions and D / 128, in any strides; value = element * scale. `dtype` is then the result dtype.
    """

    layout: str
    x: Tensor
    offsets: Tensor | None = None
    counts: Tensor | None = None
    scales: Tensor | None = None
    dtype: Any = None

    @property
    def result_dtype(self) -> Any:
        return self.x.dtype if self.scales is None else self.dtype


@dataclass
class ExpertWeights:
    """The experts of one layer on this rank, filled expert by expert while loading. `data` is private to the kernel."""

    num_experts: int
    hidden: int
    width: int
    data: Any
    num_bytes: int


class ExpertsKernel(Protocol):
    name: str

    def allocate(self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any) -> ExpertWeights:
        """Reserves the weights of a layer in the kernel's layout."""

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Stores one expert: gate, up [I, D], down [D, I], in the activation dtype."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        """Returns rows in the layout of the batch; rows beyond counts are unspecified."""


@runtime_checkable
class BlockScaledExperts(Protocol):
    """A kernel that keeps block-FP8 experts as the checkpoint stores them; `run` quantizes its input rows."""

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: Any, power_of_two: bool = False
    ) -> ExpertWeights:
        """Reserves FP8 weights and scales of a layer. `power_of_two`: see `BlockWeight`, for all experts."""

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        """Stores one expert: gate, up [I, D], down [D, I]."""


@runtime_checkable
class FusedExperts(Protocol):
    """A kernel that also permutes and combines: the whole routed part of a layer on one rank in one call."""

    def run_routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        """x [T, D], topk_weights float32 [T, K], topk_ids int32 [T, K] -> add + sum_k w_k * expert_k(x) [T, D].

        `add` [T, D] is the shared expert's output. The sum over k runs in the order of the columns (the result does not
        depend on the other tokens). Ids outside [0, E) contribute nothing.
        """


@runtime_checkable
class ReadsRows(Protocol):
    """A kernel that accepts quantized tokens: batches with `scales`, and an `Activation` in `FusedExperts`. It also
    accepts unquantized tokens, and quantizes them itself."""

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        """The activation format that products with these experts read."""


@dataclass(frozen=True)
class MoELayer:
    """The weights of a mixture-of-experts layer on one rank."""

    gate: Tensor  # [E, D] float32
    bias: Tensor | None  # [E] float32
    router: RouterSpec
    experts: ExpertWeights
    shared: tuple[PreparedLinear, PreparedLinear] | None  # the shared expert: gate and up [2I, D], down [D, I]


@runtime_checkable
class FusedMoE(Protocol):
    """A kernel that also routes and adds the shared expert: the whole layer on one rank in one call."""

    def fuse(self, layer: MoELayer) -> Any | None:
        """The handle for `run_layer`; None if these weights are not supported."""

    def run_layer(self, layer: Any, x: Tensor, topk_ids: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], bit-identical to the separate calls. `topk_ids` int32 [T, K], contiguous, if given,
        receives the router's choices."""


@runtime_checkable
class MovableExperts(Protocol):
    """A kernel whose prepared experts can be copied from slot to slot, and from rank to rank."""

    def expert_memory(self, weights: ExpertWeights, expert: int) -> Sequence[Tensor]:
        """All memory of one expert as contiguous views, same number and shapes for every expert of these weights."""
