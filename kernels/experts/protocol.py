"""Grouped matrix products of routed experts: out = down(silu(gate(x)) * up(x)) with each row's own expert.

Legend: T tokens, D hidden, I expert width, E (local) experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import ActivationFormat, KernelFormat
from moe_engine.kernels.vendors.warming import StepShapes

if TYPE_CHECKING:
    from moe_engine.kernels.decoder.layers import FusedMoE, MoELayer


@dataclass(frozen=True)
class QuantizedExperts:
    """Experts kept as the checkpoint stores them; `ExpertsKernel.run` quantizes its input rows if necessary."""

    allocate: Callable[[int, int, int, Any, Any], ExpertWeights]
    """(num_experts, hidden, width, device, format) -> the weights of a layer; format: a `KernelFormat`."""

    load: Callable[[ExpertWeights, int, Any, Any, Any], None]
    """(weights, expert, gate, up, down): copies one expert: gate, up [I, D], down [D, I], each a `QuantizedWeight`."""

    of_two: Callable[[Any, int, int, int, Any, Any], ExpertWeights] | None = None
    """`allocate` with the format of down as first argument, if it may differ from that of gate and up."""

    takes: Callable[[Any], bool] | None = None
    """(format): whether it is supported; None: every format of the class is."""

    squared: bool = False
    """Whether `allocate` and `of_two` take the keyword `squared`: experts without a gate, as `allocate_squared`."""


@dataclass(frozen=True)
class ExpertsCapabilities:
    """The optional parts of an experts kernel; None: not supported."""

    quantized: Mapping[type[KernelFormat], QuantizedExperts] = field(default_factory=dict)
    """Formats that are multiplied without dequantization."""

    fuse_layer: Callable[[MoELayer], FusedMoE | None] | None = None
    """The whole layer on one rank in one call, router and shared expert included; None if these weights are not
    supported."""

    row_alignment: Callable[[ExpertWeights, int], int] | None = None
    """The alignment of `aligned` batches that `run` takes with these weights if about so many rows of an expert are
    expected (0: not known); 0: not supported."""

    column_scales: bool = False
    """Scales of dispatched rows are read column-major; other strides are copied."""

    routed_rows: Callable[[Any, Tensor, Tensor, ExpertWeights, Tensor | None], ExpertRows] | None = None
    """`run_routed` with its arguments, before the sum: for a norm that sums."""

    takes_shared: bool = False
    """Whether shared experts should take slots after the routed ones, where they cost no launch."""

    read_first: Callable[[ExpertWeights, int], Tensor] | None = None
    """(weights, slot): memory of the slots from there on that the first product reads, contiguous."""

    allocate_squared: Callable[[int, int, int, Any, Any], ExpertWeights] | None = None
    """`allocate` of experts without a gate (`GatedActivation.squared`), of even width. `load_expert` takes the first
    half of up's rows as gate, and the second as up. Kernels with `biases` have it."""

    biases: bool = False
    """Products with `ExpertWeights.bias`. The row in `kernels.tables` has the same field."""

    clamps: bool = False
    """Activations with a limit (GELU's, too) in `ExpertWeights.activation`. The row in `kernels.tables` has the same
    field."""

    warm_up: Callable[[StepShapes], int] | None = None
    """Runs everything that the kernel compiles at first use, see `vendors.warming`; returns the number of products
    run."""


class ExpertsKernel(Protocol):
    name: str

    @property
    def capabilities(self) -> ExpertsCapabilities: ...

    def allocate(self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any) -> ExpertWeights:
        """Reserves the weights of a layer in the kernel's layout."""

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Stores one expert: gate, up [I, D], down [D, I], in the activation dtype."""

    def expert_memory(self, weights: ExpertWeights, expert: int) -> Sequence[Tensor]:
        """All memory of one expert, without biases, as contiguous views, same number and shapes for every expert of
        these weights: prepared experts are copied from slot to slot, and from rank to rank."""

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        """The activation format that products with these experts read. If it has rows, the kernel accepts batches with
        `scales`, and still quantizes unquantized tokens itself."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        """Returns rows in the layout of the batch; rows beyond counts are unspecified."""

    def run_routed(
        self, x: Any, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        """The routed part of a layer on one rank, permutation and combine included: x [T, D], topk_weights float32
        [T, K], topk_ids int32 [T, K] -> add + sum_k w_k * expert_k(x) [T, D].

        x may be quantized if `input_format` has rows. `add` [T, D] is the shared expert's output, or None. The sum over
        k runs in the order of the columns (the result does not depend on the other tokens). Ids outside [0, E)
        contribute nothing.
        """
