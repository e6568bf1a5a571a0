"""Input rows and weights of routed experts.

Legend: D hidden, E (local) experts, M rows.
Dispatchers produce, and kernels accept, two batch layouts:
`grouped`: rows sorted by expert, contiguous, with counts per expert; `padded`: [E, capacity, D] with counts. A kernel
with `row_alignment` also accepts `aligned`: rows sorted by expert, with gaps before the starts of groups. `fused`
batches are for kernels that exchange tokens themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_engine.kernels.gate_form import SILU, GatedActivation


@dataclass(frozen=True)
class FusedTokens:
    """Tokens that a kernel sends, multiplies and sums in one call: they are in the library's symmetric `buffer`, with
    their choices. `bound`: max tokens of any rank in the call, the same on all ranks."""

    buffer: Any
    bound: int


@dataclass(frozen=True)
class ExpertBatch:
    """Input rows of the experts. Router weights are applied later, by the dispatcher's combine, unless the batch has
    them.

    grouped: `x` [M, D], rows of expert e at offsets[e]:offsets[e+1]; `offsets` int32 [E+1] on the device.
    padded: `x` [E, capacity, D], the first counts[e] rows of expert e valid; `counts` int32 [E].
    aligned: `x` [M, D], `ends` int32 [E] on the device: end of the rows of expert e, which start at the next multiple
    of `alignment` after the end of the previous expert (`RowGroups`). `mean_rows`: rows of an expert that the host
    expects from the step's size, for the choice of tiles; 0: unknown. `row_weights` float32 [M]: results are those of
    the experts times these.
    fused: `x` [T, D] this rank's tokens, also in the buffer of `fused`; the result is that of `combine`. `counts`, if
    given, zeroes to which the call adds the rows of each expert.

    If the kernel's `input_format` has rows, rows dispatched in FP8 may stay quantized: `x` e4m3, `scales` float32 of
    its leading dimensions and D / 128, in any strides; value = element * scale. `dtype` is then the result dtype.
    """

    layout: str
    x: Tensor
    offsets: Tensor | None = None
    counts: Tensor | None = None
    scales: Tensor | None = None
    dtype: Any = None
    mean_rows: int = 0
    ends: Tensor | None = None
    alignment: int = 1
    row_weights: Tensor | None = None
    fused: FusedTokens | None = None

    @property
    def result_dtype(self) -> Any:
        return self.x.dtype if self.scales is None else self.dtype


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of the experts' products, and the clamped activation that comes with them (gpt-oss):
    (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-limit.

    Attributes:
        gate_up: float32 [E, 2I], gate first. down: float32 [E, D], added before the router's weight.
    """

    gate_up: Tensor
    down: Tensor
    alpha: float
    limit: float

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down


@dataclass
class ExpertWeights:
    """The experts of one layer on this rank, filled expert by expert while loading. `data` is private to the kernel.
    `bias`: only for kernels whose capabilities have `biases`. `activation`: of experts without biases; forms other than
    SiLU only for these kernels, a limit of SiLU only for kernels whose capabilities have `clamps`."""

    num_experts: int
    hidden: int
    width: int
    data: Any
    num_bytes: int
    bias: ExpertBiases | None = None
    activation: GatedActivation = SILU
