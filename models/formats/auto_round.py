"""``quant_method: auto-round``: AutoRound's settings of weights in GPTQ's or AWQ's layout. Imports no torch.

Source: AutoRound, export/export_to_autoround; without act-order, zero points of GPTQ's layout are stored minus 1.
"""

from __future__ import annotations

from typing import Any

from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.awq import AWQ
from moe_engine.models.formats.gptq import GPTQ
from moe_engine.models.formats.integers import parse_bits, parse_group
from moe_engine.models.formats.module_rules import Modules, check_patterns
from moe_engine.models.formats.schemes import Scheme, SchemeFormat, every_linear

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16
_PATTERN = "*+?^$()[]{}|\\"
"""Characters that make a name of `extra_config` a regular expression, which is searched in the names of modules."""


def parse_auto_round(section: Fields) -> SchemeFormat:
    """Raises ConfigError for settings that are not supported."""
    form = section.choice("packing_format", _GPTQ, _GPTQ, _AWQ)
    section.check_served({"data_type": "int"})
    own: Any = section.raw.get("extra_config") or {}
    if not isinstance(own, dict) or not all(isinstance(settings, dict) for settings in own.values()):
        section.fail("extra_config", "must be an object with settings of modules")
    rules, plain = [], ["lm_head"]
    for name, settings in own.items():
        fields = Fields({**section.raw, **settings}, section.source, f"quantization_config.extra_config.{name}.")
        target = name if set(name).isdisjoint(_PATTERN) else f"re:(.*)({name})"
        check_patterns(section, "extra_config", (target,))
        if fields.integer("bits") >= _PLAIN_BITS:
            plain.append(target)
        else:
            rules.append((Modules((target,)), _scheme(fields, form)))
    return SchemeFormat("auto-round", (*rules, *every_linear(_scheme(section, form))), Modules(tuple(plain)))


def _scheme(fields: Fields, form: str) -> Scheme:
    bits, symmetric = parse_bits(fields), fields.flag("sym", True)
    if form == _GPTQ:
        return GPTQ(bits, parse_group(fields), symmetric)
    if bits != 4:
        fields.fail("bits", "must be 4 in AWQ's layout")
    return AWQ(4, parse_group(fields), symmetric=False)
