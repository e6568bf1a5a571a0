"""Block FP8 as DeepSeek V3 stores it: `prefix.weight` in e4m3, one scale per block in `prefix.weight_scale_inv`
(`prefix.weight_scale` in compressed-tensors), or one scale for the matrix.

Weights without scales in such a checkpoint are plain. Kernels multiply blocks of 128 x 128; others are dequantized.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from moe_engine.kernels.weight_forms import FP8_BLOCKS, Multiplied, families
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config_sections.fields import Fields, is_whole
from moe_engine.models.formats.module_rules import NONE, Modules, name_list
from moe_engine.models.formats.plain import FLOATS, PLAIN
from moe_engine.models.formats.protocol import FAMILIES, Shape, StoredTensor, StoredTensors, WeightFormat, family_of

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "BF16", "F8_E8M0", "U8")
"""Dtypes of weights and of scales (U8 holds E8M0 bytes)."""
SCALE_ENDS = (".weight_scale_inv", ".scale", ".weight_scale")
"""Names of a scale grid: DeepSeek V3's, DeepSeek V4's, compressed-tensors'."""

KERNEL_BLOCK = (128, 128)
"""Rows and columns of a scale in kernels."""
BLOCK_BYTES = 1 + Fraction(4, prod(KERNEL_BLOCK))
"""Bytes of an element with its share of a scale, in kernels."""
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class BlockFP8Format:
    """`WeightFormat` of ``quant_method: fp8``.

    Attributes:
        block: rows and columns per scale; blocks at the edges are smaller.
        scale_format: ``ue8m0``: scales are powers of two, also those of activations.
        plain: modules that the config names as not quantized, for the memory ledger; what is read follows the tensors.
        kept: kernel families whose rows multiply the weights as stored, for the memory ledger. Not in the `repr`, which
            names pages in the storage: the order of a set differs between processes.
    """

    block: tuple[int, int] = KERNEL_BLOCK
    scale_format: str | None = None
    plain: Modules = field(default=NONE, repr=False)
    kept: frozenset[str] = field(default=FAMILIES, repr=False)

    @classmethod
    def parse(cls, section: Fields) -> BlockFP8Format:
        """Raises ConfigError for settings that are not supported."""
        if section.text("activation_scheme", "dynamic") != "dynamic":
            section.fail("activation_scheme", "must be dynamic: static activation scales are not supported")
        block = section.raw.get("weight_block_size") or list(KERNEL_BLOCK)
        if not isinstance(block, list) or len(block) != 2 or not all(is_whole(b) and b > 0 for b in block):
            section.fail("weight_block_size", f"must be two positive integers, found {block!r}")
        plain = Modules(parts=name_list(section, "ignored_layers", "modules_to_not_convert"))
        return cls((int(block[0]), int(block[1])), section.text("scale_fmt", None), plain)

    @property
    def name(self) -> str:
        return "fp8"

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        scale = scale_of(prefix, names)
        if scale is None:
            return PLAIN.tensors(prefix, shape, names)
        grid = tuple(-(-size // block) for size, block in zip(shape, self.block))
        weight = StoredTensor(f"{prefix}.weight", shape, (*FP8, *FLOATS))
        return weight, StoredTensor(scale, grid, SCALES, ((), (1,), (1, 1), (grid[0], 1, grid[1], 1)))

    def is_scale(self, name: str) -> bool:
        return name.endswith(("_scale_inv", ".scale", "_scale"))

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        if prefix in self.plain or family_of(prefix) not in self.kept:
            return Fraction(dtype_bytes)
        return 1 + Fraction(4, prod(self.block))

    @property
    def in_blocks(self) -> frozenset[str]:
        """The families of `kept` whose weights are FP8 blocks."""
        return self.kept

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        kept = families(multiplied, FP8_BLOCKS) if self.block == KERNEL_BLOCK else None
        return replace(self, kept=kept) if kept else PLAIN

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        from moe_engine.kernels.quantization.protocol import BlockFP8

        return BlockFP8(self.scale_format == "ue8m0") if self.has_kernel_formats else None

    @property
    def has_kernel_formats(self) -> bool:
        return self.block == KERNEL_BLOCK

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        if self.block != KERNEL_BLOCK or scale_of(prefix, source.names) is None:
            return False
        return source.dtype_of(f"{prefix}.weight") == "F8_E4M3" and cut.keeps_whole(shape, self.block)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.protocol import BlockWeight

        weight, *scales = self.tensors(prefix, shape, source.names)
        if not scales:
            PLAIN.load(source, prefix, shape, cut, out)
            return
        with source.open(scales[0]) as raw:
            grid = scale_values(raw)
        whole = grid.numel() == 1
        grid = (
            grid.reshape(1, 1).repeat(scales[0].shape) if whole else grid.reshape(scales[0].shape)
        )  # ModelOpt: 4 axes
        if isinstance(out, BlockWeight):
            out.scales.copy_(cut.in_blocks(self.block).of(grid))
            source.read_into(weight, cut, out.data)
            return
        with source.open(weight, cut) as part:
            dequantize_into(out, part, grid, self.block, cut)  # type: ignore[arg-type]  # a Tensor


def has_scales(names: Collection[str]) -> bool:
    """True if a checkpoint with tensors of these names has block-FP8 weights."""
    return any(name.endswith(SCALE_ENDS[:2]) and f"{name.rpartition('.')[0]}.weight" in names for name in names)


def scale_of(prefix: str, names: Collection[str]) -> str | None:
    """Name of a weight's scale grid; None if there is none."""
    return next((prefix + end for end in SCALE_ENDS if prefix + end in names), None)


def scale_values(raw: Tensor) -> Tensor:
    """A copy in float32. uint8 is e8m0: value 2^(byte - 127)."""
    import torch

    return (raw.view(torch.float8_e8m0fnu) if raw.dtype == torch.uint8 else raw).to(torch.float32, copy=True)


def dequantize_into(out: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], cut: Cut) -> None:
    """out[r, c] = weight[r, c] * scale[r div block, c div block], a bounded number of rows at a time.

    `weight` is the slice `cut` of a tensor with full scale grid `scale`; blocks at the edges are smaller.
    """
    import torch

    from moe_engine.kernels.cpu.fp8_weights import fp8_values

    num_rows, num_cols = weight.shape
    first_row, first_col = _first(cut.rows), _first(cut.cols)
    if fp8_values(out, weight, scale, block, (first_row, first_col)):
        return
    weight, scale = weight.to(out.device), scale.to(out.device)
    row_block = (torch.arange(num_rows, device=out.device) + first_row) // block[0]
    col_block = (torch.arange(num_cols, device=out.device) + first_col) // block[1]
    step = max(1, _CHUNK_ELEMENTS // max(1, num_cols))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        grid = scale.index_select(0, row_block[start:stop]).index_select(1, col_block)
        out[start:stop].copy_(grid.mul_(weight[start:stop].float()))


def _first(cut: slice | None) -> int:
    return (cut.start or 0) if cut else 0
