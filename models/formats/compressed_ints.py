"""Integer weights as compressed-tensors stores them: packed into int32 (``pack-quantized``), or as int8
(``int-quantized``, ``naive-quantized``). Imports no torch.

Source: compressed-tensors, compressors/pack_quantized; codes are stored with an offset of 2^(bits - 1).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.integers import SCALES, IntegerScheme, consume, read_row_scales, read_scales, row_scales
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.models.formats.codes import Codes


@dataclass(frozen=True)
class PackedInts(IntegerScheme):
    """`weight_packed` int32 [N, ceil(K * bits / 32)], lowest bits first; `weight_scale` [N, G]; asymmetric:
    `weight_zero_point` int32 [ceil(N * bits / 32), G]; act-order: `weight_g_idx` [K]."""

    marker: ClassVar[str] = ".weight_packed"
    extras: ClassVar[tuple[str, ...]] = (
        ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".input_scale", ".input_zero_point",
    )  # fmt: skip

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        (n, k), per = shape, 32 // self.bits
        groups = self.num_groups(k)
        found = [
            StoredTensor(f"{prefix}.weight_packed", (n, -(-k // per)), ("I32",)),
            StoredTensor(f"{prefix}.weight_scale", (n, groups), SCALES),
        ]
        if not self.symmetric:
            found.append(StoredTensor(f"{prefix}.weight_zero_point", (-(-n // per), groups), ("I32",)))
        if self.act_order:
            found.append(StoredTensor(f"{prefix}.weight_g_idx", (k,), ("I32",)))
        if f"{prefix}.weight_shape" in names:
            found.append(StoredTensor(f"{prefix}.weight_shape", (2,), ("I64", "I32")))
        return tuple(found)

    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        from moe_engine.models.formats.codes import Codes, cover, groups_of, nibbles

        (n, k), per = shape, 32 // self.bits
        packed, scale, *rest = self.tensors(prefix, shape, source.names)
        by_name = {tensor.name.rpartition(".")[2]: tensor for tensor in rest}
        columns, within = cover(cut.cols, k, per)
        with source.open(packed, Cut(cut.rows, columns)) as part:
            values = nibbles(part, self.bits)[:, within]
        scales = read_scales(source, scale, Cut(cut.rows))
        groups, zeros = groups_of(cut.cols, k, self.group), None
        if (index := by_name.get("weight_g_idx")) is not None:
            with source.open(index) as part:
                groups = part[cut.cols or slice(None)].long()
        if (zero := by_name.get("weight_zero_point")) is not None:
            stored_rows, rows = cover(cut.rows, n, per)
            with source.open(zero, Cut(stored_rows)) as part:
                zeros = nibbles(part.t().contiguous(), self.bits)[:, rows].t().contiguous()
        if (whole := by_name.get("weight_shape")) is not None:
            consume(source, whole)
        return Codes(values, scales, zeros, 1 << (self.bits - 1), groups)


@dataclass(frozen=True)
class ByteInts(IntegerScheme):
    """`weight` int8 [N, K]; `weight_scale` [N, G], [N] or [1]; asymmetric: `weight_zero_point` int8 of the same shape.
    Activations are not quantized, so scales of activations are not used."""

    marker: ClassVar[str] = ".weight"
    extras: ClassVar[tuple[str, ...]] = (".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point")

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.weight" in names and f"{prefix}.weight_scale" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        found = [
            StoredTensor(f"{prefix}.weight", shape, ("I8",)),
            self._of_groups(f"{prefix}.weight_scale", shape, SCALES),
        ]
        if not self.symmetric:
            found.append(self._of_groups(f"{prefix}.weight_zero_point", shape, ("I8",)))
        for name in (f"{prefix}.input_scale", f"{prefix}.input_zero_point"):
            if name in names:
                found.append(StoredTensor(name, (1,), (*SCALES, "I8")))
        return tuple(found)

    def _of_groups(self, name: str, shape: Shape, dtypes: tuple[str, ...]) -> StoredTensor:
        if self.group == 0:
            return row_scales(name, shape[0], dtypes)
        return StoredTensor(name, (shape[0], self.num_groups(shape[1])), dtypes)

    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        import torch

        from moe_engine.models.formats.codes import Codes, groups_of

        weight, scale, *rest = self.tensors(prefix, shape, source.names)
        with source.open(weight, cut) as part:
            values = part.view(torch.uint8) ^ 128
        read = read_row_scales if self.group == 0 else _read_rows
        scales, zeros = read(source, scale, cut), None
        if not self.symmetric:
            zeros = read(source, rest.pop(0), cut).contiguous().view(torch.uint8) ^ 128
        consume(source, *rest)
        return Codes(values, scales, zeros, 128, groups_of(cut.cols, shape[1], self.group))


def _read_rows(source: StoredTensors, tensor: StoredTensor, cut: Cut) -> Tensor:
    return read_scales(source, tensor, Cut(cut.rows))
