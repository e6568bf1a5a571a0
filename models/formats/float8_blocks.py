"""Block FP8 as one of several schemes of a checkpoint: ModelOpt's FP8_PB_WO and MXFP8, compressed-tensors' strategy
``block`` and ``mxfp8-quantized``. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from moe_engine.kernels.weight_forms import FP8_BLOCKS, WeightForm
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import BLOCK_BYTES, SCALE_ENDS, BlockFP8Format
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

MX_BLOCK = (1, 32)
"""Rows and columns of a scale in MXFP8."""
MXFP8 = BlockFP8Format(MX_BLOCK, "ue8m0")
_BLOCKS = BlockFP8Format()


@dataclass(frozen=True)
class BlockFloat8(Scheme):
    """Blocks of 128 x 128 are multiplied as stored; others are dequantized while loading."""

    blocks: BlockFP8Format = _BLOCKS

    @property
    def extras(self) -> tuple[str, ...]:
        return SCALE_ENDS

    @property
    def form(self) -> WeightForm | None:
        return FP8_BLOCKS if self.blocks.has_kernel_formats else None

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        is_nvfp4 = f"{prefix}.weight_scale_2" in names
        return f"{prefix}.weight" in names and not is_nvfp4 and any(prefix + end in names for end in SCALE_ENDS)

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        return self.blocks.tensors(prefix, shape, names)

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        return BLOCK_BYTES if self.blocks.has_kernel_formats else None

    def kernel_format(self) -> KernelFormat | None:
        return self.blocks.kernel_format("")

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return self.blocks.keeps(source, prefix, shape, cut)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        self.blocks.load(source, prefix, shape, cut, out)
