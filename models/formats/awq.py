"""AWQ: codes in int32 along the rows, in AWQ's order of eight. Imports no torch.

`prefix.qweight` int32 [K, N / 8], `prefix.qzeros` int32 [G, N / 8], `prefix.scales` [G, N]. Source: AutoAWQ, gemm
packing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.integers import SCALES, IntegerScheme, parse_bits, parse_group, read_scales
from moe_engine.models.formats.module_rules import Modules, name_list
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import SchemeFormat, every_linear

if TYPE_CHECKING:
    from moe_engine.models.formats.codes import Codes

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight values in an int32, from the lowest bits."""


@dataclass(frozen=True)
class AWQ(IntegerScheme):
    """A `Scheme` with zero points."""

    marker: ClassVar[str] = ".qweight"
    extras: ClassVar[tuple[str, ...]] = (".qzeros", ".scales")

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        (n, k), groups = shape, self.num_groups(shape[1])
        return (
            StoredTensor(f"{prefix}.qweight", (k, -(-n // 8)), ("I32",)),
            StoredTensor(f"{prefix}.qzeros", (groups, -(-n // 8)), ("I32",)),
            StoredTensor(f"{prefix}.scales", (groups, n), SCALES),
        )

    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        from moe_engine.models.formats.codes import Codes, cover, groups_of, nibbles

        n, k = shape
        weight, zero, scale = self.tensors(prefix, shape, source.names)
        stored, within = cover(cut.rows, n, 8)
        with source.open(weight, Cut(cut.cols, stored)) as part:
            values = nibbles(part, 4, ORDER)[:, within].t()
        with source.open(zero, Cut(None, stored)) as part:
            zeros = nibbles(part, 4, ORDER)[:, within].t().contiguous()
        scales = read_scales(source, scale, Cut(None, cut.rows)).t().contiguous()
        return Codes(values, scales, zeros, 0, groups_of(cut.cols, k, self.group))


def parse_awq(section: Fields) -> SchemeFormat:
    """``quant_method: awq``. Raises ConfigError for settings that are not supported."""
    if parse_bits(section) != 4:
        section.fail("bits", "must be 4")
    if section.text("version", "gemm").lower() != "gemm":
        section.fail("version", f"{section.text('version')!r} is not supported; served is gemm")
    if not section.flag("zero_point", True):
        section.fail("zero_point", "must be true: AWQ without zero points is not supported")
    scheme = AWQ(4, parse_group(section), symmetric=False)
    return SchemeFormat(
        "awq", every_linear(scheme), Modules(("lm_head",), name_list(section, "modules_to_not_convert"))
    )
