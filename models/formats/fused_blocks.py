"""Block FP8 with the experts of a layer in common tensors, as Qwen3-VL-MoE is published. Imports no torch.

Legend: E experts, D hidden, I expert width, B the size of a block.

`gate_up_proj` e4m3 [E, D, 2I], the gate's columns first, with `gate_up_proj_scale_inv` [E, D / B, 2I / B], and
`down_proj` [E, I, D]. Mistral Small 4, Qwen3.5: not transposed, [E, 2I, D] and [E, D, I]. Experts may also be
unquantized, or have a matrix each. Sources: vLLM, qwen3_vl_moe; transformers, integrations/finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import FP8, SCALES, BlockFP8Format, dequantize_into, scale_values
from moe_engine.models.formats.fused_experts import FusedExpertsFormat, Place, place_of
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight


@dataclass(frozen=True)
class FusedBlockFP8(BlockFP8Format):
    """Attributes:
    num_experts: E.
    transposed: the experts' matrices are stored as [K, N].
    joined: as in `FusedExpertsFormat`.
    """

    num_experts: int = 0
    transposed: bool = False
    joined: bool = True

    @property
    def _unquantized(self) -> FusedExpertsFormat:
        return FusedExpertsFormat(
            self.num_experts, alternating=False, transposed=self.transposed, optional=True, joined=self.joined
        )

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        place = _fused(prefix, names, self.joined)
        if place is None:
            return super().tensors(prefix, shape, names)
        if not _has_scales(place, names):
            return self._unquantized.tensors(prefix, shape, names)
        whole = (place.parts * shape[0], shape[1])
        grid = tuple(-(-size // block) for size, block in zip(whole, self.block))
        if self.transposed:
            whole, grid = whole[::-1], grid[::-1]
        return (
            StoredTensor(place.name, (self.num_experts, *whole), FP8),
            StoredTensor(f"{place.name}_scale_inv", (self.num_experts, *grid), SCALES),
        )

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        place = _fused(prefix, source.names, self.joined)
        if place is None:
            return super().keeps(source, prefix, shape, cut)
        whole = self.has_kernel_formats and place.part * shape[0] % self.block[0] == 0
        return whole and source.dtype_of(place.name) == "F8_E4M3" and cut.keeps_whole(shape, self.block)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.protocol import BlockWeight

        place = _fused(prefix, source.names, self.joined)
        if place is None:
            super().load(source, prefix, shape, cut, out)
            return
        if not _has_scales(place, source.names):
            self._unquantized.load(source, prefix, shape, cut, out)
            return
        weight, scales = self.tensors(prefix, shape, source.names)
        expert, first = Cut(slice(place.expert, place.expert + 1)), place.part * shape[0]
        with source.open(scales, expert) as part:
            grid = self._rows(scale_values(part)[0])
        with source.open(weight, expert) as part:
            matrix = cut.of(self._rows(part[0])[first : first + shape[0]])
            start, stop, _ = (cut.rows or slice(None)).indices(shape[0])
            place_in_grid = Cut(slice(first + start, first + stop), cut.cols)
            if isinstance(out, BlockWeight):
                out.scales.copy_(place_in_grid.in_blocks(self.block).of(grid))
                out.data.copy_(matrix)
            else:
                dequantize_into(out, matrix, grid, self.block, place_in_grid)  # type: ignore[arg-type]  # a Tensor

    def _rows(self, matrix: Tensor) -> Tensor:
        """[N, K] of a matrix or a grid as stored."""
        return matrix.T.contiguous() if self.transposed else matrix


def with_fused_experts(format: WeightFormat, num_experts: int, transposed: bool, joined: bool = True) -> WeightFormat:
    """Block FP8 whose experts may be in common tensors; other formats are unchanged."""
    if not isinstance(format, BlockFP8Format):
        return format
    known = {field.name: getattr(format, field.name) for field in fields(format)}
    return FusedBlockFP8(**known, num_experts=num_experts, transposed=transposed, joined=joined)


def common_experts(format: WeightFormat, num_experts: int) -> WeightFormat:
    """The format of a checkpoint with experts in common tensors [E, 2I, D] and [E, D, I], or with a matrix each."""
    if format.name:
        return with_fused_experts(format, num_experts, transposed=False)
    return FusedExpertsFormat(num_experts, alternating=False, transposed=False, optional=True)


def _fused(prefix: str, names: Collection[str], joined: bool) -> Place | None:
    """None: not a matrix of an expert, or one of its own."""
    place = place_of(prefix, joined)
    return place if place is not None and place.name in names else None


def _has_scales(place: Place, names: Collection[str]) -> bool:
    return f"{place.name}_scale_inv" in names
