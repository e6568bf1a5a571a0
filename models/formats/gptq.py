"""GPTQ: codes in int32 along the columns, with or without act-order. Imports no torch.

`prefix.qweight` int32 [K * bits / 32, N], `prefix.qzeros` int32 [G, N * bits / 32], `prefix.scales` [G, N],
`prefix.g_idx` int32 [K], lowest bits first. Zero points are stored minus 1 (format ``gptq``), or as they are
(``gptq_v2``). Source: GPTQModel, nn_modules/qlinear.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.integers import SCALES, IntegerScheme, parse_bits, parse_group, read_scales
from moe_engine.models.formats.module_rules import Modules, check_patterns, name_list
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme, SchemeFormat, every_linear

if TYPE_CHECKING:
    from moe_engine.models.formats.codes import Codes


@dataclass(frozen=True)
class GPTQ(IntegerScheme):
    """
    Attributes:
        zero_offset: added to stored zero points.
    """

    zero_offset: int = 1

    marker: ClassVar[str] = ".qweight"
    extras: ClassVar[tuple[str, ...]] = (".qzeros", ".scales", ".g_idx")

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        (n, k), groups, per = shape, self.num_groups(shape[1]), 32 // self.bits
        found = [
            StoredTensor(f"{prefix}.qweight", (-(-k // per), n), ("I32",)),
            StoredTensor(f"{prefix}.qzeros", (groups, -(-n // per)), ("I32",)),
            StoredTensor(f"{prefix}.scales", (groups, n), SCALES),
        ]
        if self.act_order or f"{prefix}.g_idx" in names:
            found.append(StoredTensor(f"{prefix}.g_idx", (k,), ("I32",)))
        return tuple(found)

    def read(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> Codes:
        from moe_engine.models.formats.codes import Codes, cover, groups_of, nibbles

        (n, k), per = shape, 32 // self.bits
        weight, zero, scale, *index = self.tensors(prefix, shape, source.names)
        stored, within = cover(cut.cols, k, per)
        with source.open(weight, Cut(stored, cut.rows)) as part:
            values = nibbles(part.t().contiguous(), self.bits)[:, within]
        stored, within = cover(cut.rows, n, per)
        with source.open(zero, Cut(None, stored)) as part:
            zeros = nibbles(part, self.bits)[:, within].t().contiguous()
        zeros = zeros.add_(self.zero_offset).bitwise_and_((1 << self.bits) - 1)
        scales = read_scales(source, scale, Cut(None, cut.rows)).t().contiguous()
        groups = groups_of(cut.cols, k, self.group)
        if index:
            with source.open(index[0], UNCUT) as part:
                groups = part[cut.cols or slice(None)].long()
        return Codes(values, scales, zeros, 0, groups)


def parse_gptq(section: Fields) -> SchemeFormat:
    """``quant_method: gptq``. Raises ConfigError for settings that are not supported."""
    form = section.choice("checkpoint_format", "gptq", "gptq", "gptq_v2")
    symmetric, offset = section.flag("sym", True), int(form == "gptq")
    bits, group, ordered = parse_bits(section), parse_group(section), section.flag("desc_act", False)
    scheme = GPTQ(bits, group, symmetric, ordered, zero_offset=offset)
    skipped = Modules(
        ("lm_head",) if not section.flag("lm_head", False) else (), name_list(section, "modules_to_not_convert")
    )
    rules, left_out = _dynamic(section, scheme)
    return SchemeFormat("gptq", (*rules, *every_linear(scheme)), Modules(skipped.targets + left_out, skipped.parts))


def _dynamic(section: Fields, scheme: GPTQ) -> tuple[list[tuple[Modules, Scheme]], tuple[str, ...]]:
    """Modules with settings of their own (``+:pattern``), and modules that are not quantized (``-:pattern``)."""
    found: Any = section.raw.get("dynamic") or {}
    if not isinstance(found, dict):
        section.fail("dynamic", f"must be an object, found {found!r}")
    rules: list[tuple[Modules, Scheme]] = []
    skipped: list[str] = []
    for pattern, settings in found.items():
        target = "re:" + pattern.removeprefix("+:").removeprefix("-:")
        check_patterns(section, "dynamic", (target,))
        if pattern.startswith("-:"):
            skipped.append(target)
            continue
        own = Fields({**section.raw, **(settings or {})}, section.source, "quantization_config.dynamic.")
        changed = GPTQ(
            parse_bits(own),
            parse_group(own),
            own.flag("sym", True),
            own.flag("desc_act", False),
            zero_offset=scheme.zero_offset,
        )
        rules.append((Modules((target,)), changed))
    return rules, tuple(skipped)
