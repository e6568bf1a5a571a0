"""Integer weights with a scale per group of columns or per row: what AWQ, GPTQ and compressed-tensors have in common.

Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from moe_engine.models.config_fields import Fields
from moe_engine.models.cut import UNCUT, Cut
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight
    from moe_engine.models.formats.codes import Codes

SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class IntegerScheme(ABC):
    """A `Scheme` of `bits`-bit codes: value = (code - zero) * scale.

    Attributes:
        bits: 4 or 8.
        group: columns with a common scale; 0: a scale per row.
        symmetric: there are no zero points: code 2^(bits - 1) is 0.
        act_order: the columns of a group are not adjacent (a tensor has the group of each column).
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool = False

    marker: ClassVar[str]
    """End of the name of the tensor of codes."""
    extras: ClassVar[tuple[str, ...]]

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return prefix + self.marker in names

    def num_groups(self, k: int) -> int:
        return 1 if self.group == 0 else -(-k // self.group)

    @abstractmethod
    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]: ...

    @abstractmethod
    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        """The slice's codes. Every tensor of the matrix counts as read then."""

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        return None

    def kernel_format(self) -> KernelFormat | None:
        return None

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return False

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from torch import Tensor

        codes = self.read(source, prefix, shape, cut)
        assert isinstance(out, Tensor)
        codes.dequantize_into(out)

    def randomize(self, out: QuantizedWeight, deviation: float, normal: Callable[[Tensor, float], None]) -> None:
        raise ValueError("no kernel format")


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
    """Those of a slice of rows, [N, 1]."""
    rows = tensor.shape[0]
    whole = read_scales(source, tensor).reshape(-1, 1).expand(rows, 1)
    return Cut(cut.rows).of(whole)


def parse_bits(section: Fields, name: str = "bits") -> int:
    bits: int = section.integer(name)
    if bits not in (4, 8):
        section.fail(name, f"is {bits}; served are 4 and 8 bits")
    return bits


def parse_group(section: Fields, name: str = "group_size") -> int:
    """Columns of a group; 0: a scale per row (-1 in files)."""
    size = section.raw.get(name)
    if size is None or size == -1:
        return 0
    found: int = section.integer(name)
    if found % 8:
        section.fail(name, f"is {found}; served are multiples of 8, and -1 (a scale per row)")
    return found
