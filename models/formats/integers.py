"""Integer weights with a scale per group of columns or per row: common to AWQ, GPTQ and compressed-tensors.

Imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Self

from moe_engine.errors import CheckpointError
from moe_engine.kernels.weight_forms import WeightForm
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.codes import GroupCodes
    from moe_engine.kernels.quantization.protocol import QuantizedWeight
    from moe_engine.models.formats.codes import Codes

SCALES = ("F16", "BF16", "F32")
_SPELLED = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_NAMED = {spelled: name for name, spelled in _SPELLED.items()}


@dataclass(frozen=True)
class IntegerScheme(Scheme):
    """Scheme of `bits`-bit codes: value = (code - zero) * scale.

    Attributes:
        bits: 4 or 8.
        group: columns with a common scale; 0: a scale per row.
        symmetric: there are no zero points: code 2^(bits - 1) is 0.
        act_order: the columns of a group are not adjacent (a tensor has the group of each column). Such weights are
            dequantized.
        scale_dtype: dtype of the scales of groups in the files, without files that of the unquantized model; weights
            with other scales are dequantized. Scales of rows are kept in float32.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    scale_dtype: str = "bfloat16"

    marker: ClassVar[str]
    """End of the name of the tensor of codes."""
    extras: ClassVar[tuple[str, ...]]

    @property
    def form(self) -> WeightForm | None:
        format = self.kernel_format()
        return None if format is None else format.form

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return prefix + self.marker in names

    def num_groups(self, k: int) -> int:
        return 1 if self.group == 0 else -(-k // self.group)

    @abstractmethod
    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        """The slice's codes. Every tensor of the matrix counts as read then."""

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        if self.act_order:
            return None
        size = (4 if self.group == 0 or self.scale_dtype == "float32" else 2) + (0 if self.symmetric else 1)
        return Fraction(self.bits, 8) + Fraction(size, self.group or shape[-1])

    def kernel_format(self) -> GroupCodes | None:
        from moe_engine.kernels.quantization.codes import GroupCodes

        if self.act_order:
            return None
        scales = "float32" if self.group == 0 else self.scale_dtype
        return GroupCodes(self.bits, self.group, not self.symmetric, scales)

    def of_dtype(self, dtype: str) -> Self:
        return replace(self, scale_dtype=dtype) if dtype in _SPELLED else self

    def with_scales(self, dtype: str) -> Self:
        return replace(self, scale_dtype=_NAMED[dtype]) if dtype in _NAMED else self

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        format = self.kernel_format()
        if format is None or not format.takes(cut.shape(shape)[1]) or not cut.keeps_whole(shape, (1, self.group or 1)):
            return False
        scale = next(t for t in self.tensors(prefix, shape, source.names) if t.name.endswith(("scale", "scales")))
        return self.group == 0 or source.dtype_of(scale.name) == _SPELLED[self.scale_dtype]

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.codes import CodedWeight

        codes = self.read(source, prefix, shape, cut)
        if not isinstance(out, CodedWeight):
            codes.dequantize_into(out)  # type: ignore[arg-type]  # a Tensor
            return
        first = int(codes.groups[0])
        groups = slice(first, first + out.scales.shape[1])
        out.codes.copy_(codes.values)
        out.scales.copy_(codes.scales[:, groups])
        if out.zeros is not None:
            assert codes.zeros is not None
            out.zeros.copy_(codes.zeros[:, groups])
        elif codes.zeros is not None and not bool((codes.zeros == out.format.middle).all()):
            raise CheckpointError(f"{prefix}: has zero points, but config.json says that its weights are symmetric")


def consume(source: StoredTensors, *tensors: StoredTensor) -> None:
    """Reads small tensors whose values are not needed, so that they count as read, and their shapes are checked."""
    for tensor in tensors:
        with source.open(tensor):
            pass


def read_scales(source: StoredTensors, tensor: StoredTensor, cut: Cut = UNCUT) -> Tensor:
    """A copy of a slice of scales, in the file's dtype."""
    with source.open(tensor, cut) as part:
        return part.clone()


def row_scales(name: str, rows: int, dtypes: tuple[str, ...] = SCALES) -> StoredTensor:
    """Scales of rows [N, 1] or [N], or of the whole matrix."""
    return StoredTensor(name, (rows, 1), dtypes, ((rows,), (1,), (), (1, 1)))


def read_row_scales(source: StoredTensors, tensor: StoredTensor, cut: Cut) -> Tensor:
    """Scales of a slice of rows, [N, 1]."""
    rows = tensor.shape[0]
    whole = read_scales(source, tensor).reshape(-1, 1).expand(rows, 1)
    return Cut(cut.rows).of(whole)


def parse_bits(section: Fields, name: str = "bits") -> int:
    bits: int = section.integer(name)
    if bits not in (4, 8):
        section.fail(name, f"is {bits}; served are 4 and 8 bits")
    return bits


def parse_group(section: Fields) -> int:
    """Columns of a group; 0: a scale per row (-1 in files)."""
    name = "group_size"
    size = section.raw.get(name)
    if size is None or size == -1:
        return 0
    found: int = section.integer(name)
    if found % 8:
        section.fail(name, f"is {found}; served are multiples of 8, and -1 (a scale per row)")
    return found
