"""FP8 weights (e4m3) with a scale per row or for the whole matrix: compressed-tensors (``float-quantized``), fbgemm,
ModelOpt, vLLM's ``fp8`` without blocks, SGLang's ``w8a8_fp8``. Imports no torch.

Kernels of a GPU multiply both as stored; a matrix with one scale is a matrix of FP8 blocks with equal scales.
Activations are not quantized to static scales of the checkpoint: tensors of such scales are accepted and not used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from moe_engine.kernels.weight_forms import FP8_BLOCKS, FP8_ROWS, WeightForm
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import BLOCK_BYTES, KERNEL_BLOCK
from moe_engine.models.formats.integers import SCALES, consume, read_row_scales, read_scales, row_scales
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

_SCALES = (".weight_scale", ".weight_scale_inv")
"""Names of the scales; both are factors. The second is transformers', without blocks."""
_UNUSED = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale",
    ".activation_scale",
)  # fmt: skip
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Float8(Scheme):
    """`weight` e4m3 [N, K] and `weight_scale` (`weight_scale_inv`) [N, 1], [N], [1] or []: value = element * scale."""

    form: ClassVar[WeightForm] = FP8_ROWS

    @property
    def extras(self) -> tuple[str, ...]:
        return (*_SCALES, *_UNUSED)

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.weight" in names and any(prefix + end in names for end in _SCALES)

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        ends = (end for end in _SCALES if prefix + end in names)
        scale = row_scales(prefix + next(ends, _SCALES[0]), shape[0])
        weight = StoredTensor(f"{prefix}.weight", shape, ("F8_E4M3",))
        unused = (prefix + end for end in _UNUSED if prefix + end in names)
        return (weight, scale, *(StoredTensor(name, (1,), SCALES, ((), (1, 1))) for name in unused))

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        return 1 + Fraction(4, shape[-1])

    def kernel_format(self) -> KernelFormat | None:
        from moe_engine.kernels.quantization.protocol import ROW_FP8

        return ROW_FP8

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return True

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from torch import Tensor

        from moe_engine.kernels.cpu.fp8_weights import fp8_values
        from moe_engine.kernels.quantization.protocol import RowWeight

        weight, scale, *unused = self.tensors(prefix, shape, source.names)
        consume(source, *unused)
        scales = read_row_scales(source, replace(scale, shape=(shape[0], 1)), cut).float()
        if isinstance(out, RowWeight):
            out.scales.copy_(scales[:, 0])
            source.read_into(weight, cut, out.data)
            return
        assert isinstance(out, Tensor)
        step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
        with source.open(weight, cut) as part:
            if fp8_values(out, part, scales, (1, max(1, shape[1])), (0, 0)):
                return
            for start in range(0, len(part), step):
                rows = slice(start, start + step)
                out[rows].copy_(part[rows].float().mul_(scales[rows]))


class FP8Matrix(Scheme):
    """Defaults of schemes with one scale for a matrix: kernels of a GPU multiply them as FP8 blocks."""

    form: ClassVar[WeightForm] = FP8_BLOCKS

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        return BLOCK_BYTES

    def kernel_format(self) -> KernelFormat | None:
        from moe_engine.kernels.quantization.protocol import BLOCK_FP8

        return BLOCK_FP8

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return cut.keeps_whole(shape, KERNEL_BLOCK)


@dataclass(frozen=True)
class MatrixFloat8(FP8Matrix, Float8):
    """`Float8` with one scale for a matrix, [] or [1]."""

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        weight, scale, *unused = super().tensors(prefix, shape, names)
        return (weight, row_scales(scale.name, 1), *unused)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.protocol import BlockWeight

        if not isinstance(out, BlockWeight):
            super().load(source, prefix, shape, cut, out)
            return
        weight, scale, *unused = self.tensors(prefix, shape, source.names)
        consume(source, *unused)
        out.scales.fill_(float(read_scales(source, scale)))
        source.read_into(weight, cut, out.data)
