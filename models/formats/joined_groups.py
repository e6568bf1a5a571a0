"""q, k and v of MiMo-V2.5: one matrix of rows joined by groups of heads, the first group's of q, of k and of v, then
the next group's. Its FP8 blocks begin anew in each group and reach over the bounds of q, k and v, so that these
matrices are dequantized while loading. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import FP8, SCALES, BlockFP8Format, scale_of, scale_values
from moe_engine.models.formats.plain import FLOATS
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

GROUPS = "qkv_groups"
"""The joined matrix in a model's names: other joined matrices are not stored by groups."""
_MATRIX = re.compile(r"(model\.layers\.(\d+)\.self_attn\.)([qkv])_proj")


class _Part(NamedTuple):
    """joined: the stored matrix. group: its rows in a group. first, rows: those of the part in a group."""

    joined: str
    group: int
    first: int
    rows: int


@dataclass(frozen=True)
class JoinedGroupsFormat(BlockFP8Format):
    """`WeightFormat`: as its base, but for q, k and v.

    Attributes:
        groups: their number.
        rows: of q, k and v in each layer.
    """

    groups: int = 1
    rows: tuple[tuple[int, int, int], ...] = ()

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        part = self._part(prefix)
        if part is None:
            return super().tensors(prefix, shape, names)
        weight = StoredTensor(f"{part.joined}.weight", (self.groups * part.group, shape[1]), (*FP8, *FLOATS))
        scale = scale_of(part.joined, names)
        if scale is None:
            return (weight,)
        height, width = (-(-size // block) for size, block in zip((part.group, shape[1]), self.block))
        return weight, StoredTensor(scale, (self.groups * height, width), SCALES)

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        joined = self._part(prefix) is not None
        return Fraction(dtype_bytes) if joined else super().bytes_per_element(prefix, shape, dtype_bytes)

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        return None if self._part(prefix) is not None else super().kernel_format(prefix)

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return self._part(prefix) is None and super().keeps(source, prefix, shape, cut)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        import torch

        part = self._part(prefix)
        if part is None:
            super().load(source, prefix, shape, cut, out)
            return
        weight, *scales = self.tensors(prefix, shape, source.names)
        grid = None
        if scales:
            with source.open(scales[0]) as raw:
                grid = scale_values(raw)
        first, last, _ = (cut.rows or slice(None)).indices(shape[0])
        columns = torch.arange(*(cut.cols or slice(None)).indices(shape[1])) // self.block[1]
        height, done = -(-part.group // self.block[0]), 0
        for group in range(self.groups):
            start, stop = (min(max(row - group * part.rows, 0), part.rows) for row in (first, last))
            if start == stop:
                continue
            rows = torch.arange(start, stop) + part.first
            begin = group * part.group + part.first
            with source.open(weight, Cut(slice(begin + start, begin + stop), cut.cols)) as stored:
                values = stored.float()
            if grid is not None:
                values *= grid[group * height + rows // self.block[0]][:, columns]
            out[done : done + stop - start].copy_(values)  # type: ignore[index]  # a Tensor
            done += stop - start

    def _part(self, prefix: str) -> _Part | None:
        found = _MATRIX.fullmatch(prefix)
        if found is None or int(found[2]) >= len(self.rows):
            return None
        counts = [rows // self.groups for rows in self.rows[int(found[2])]]
        which = "qkv".index(found[3])
        return _Part(f"{found[1]}{GROUPS}", sum(counts), sum(counts[:which]), counts[which])
