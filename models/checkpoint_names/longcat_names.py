"""Names of LongCat-Flash's tensors and modules as published, and here. Imports no torch.

A published layer has two attentions and two dense MLPs; here it is two layers. Its experts, ``mlp``, are ``moe`` of the
first one: published layer 3 is the layers 6 and 7.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_HALVES = r"(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])"
_LAYER = re.compile(rf"(.*\blayers)\.(\d+)\.(?:{_HALVES}|mlp)\b")
_TWO_PARTS = re.compile(rf"model\.layers\.\d+\.{_HALVES}\.")
_ROUTER = re.compile(r"model\.layers\.\d+\.mlp\.router\.(?:classifier|e_score_correction_bias)\b")
_MTP = re.compile(r"model\.mtp\.layers\.(\d+)\.(.+)")
_MTP_PARTS = {"transformer_layer.": "", "enorm.m.": "enorm.", "hnorm.m.": "hnorm."}
_MTP_OUTSIDE = {"model.mtp.norm.": "shared_head.norm.", "model.mtp.embed_tokens.": "embed_tokens."}


def has_longcat_names(names: Collection[str]) -> bool:
    """True if some of these are tensors of LongCat-Flash's layers alone."""
    return any(_TWO_PARTS.match(name) or _ROUTER.match(name) for name in names)


def longcat_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    """The model's names by those of a checkpoint. The MTP layer comes after the main layers.

    Args:
        num_layers: main layers, two for each published one; None: as many as there are tensors of.
    """
    inner = {name: inner_name(name) for name in names}
    if num_layers is None:
        layers = (re.match(r"model\.layers\.(\d+)\.", name) for name in names)
        num_layers = 2 + 2 * max((int(found[1]) for found in layers if found), default=-1)
    return {name: _mtp_name(new, num_layers) for name, new in inner.items()}


def inner_name(name: str) -> str:
    """The name of a tensor or module of a main layer, as it is here."""
    if (found := _LAYER.match(name)) is None:
        return name
    before, layer, part, half = found.groups()
    own = 2 * int(layer) + int(half or 0)
    kind = {"mlps": "mlp", None: "moe"}.get(part, part)
    return f"{before}.{own}.{kind}{name[found.end() :]}"


def _mtp_name(name: str, num_layers: int) -> str:
    for old, new in _MTP_OUTSIDE.items():
        if name.startswith(old):
            return f"model.layers.{num_layers}.{new}{name.removeprefix(old)}"
    if (found := _MTP.fullmatch(name)) is None:
        return name
    rest = found[2]
    for old, new in _MTP_PARTS.items():
        rest = new + rest.removeprefix(old) if rest.startswith(old) else rest
    return f"model.layers.{num_layers + int(found[1])}.{rest}"
