"""MiniMax-M3's image processor: transformers' of Qwen2-VL with other bounds, which transformers has for torchvision
only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_engine.errors import ConfigError

TYPE = "MiniMaxM3VLImageProcessor"
LEAST, MOST = 4 * 28 * 28, 672 * 672
"""Pixels of a scaled image."""
_WRONG_SIZES = ([672, 672], {"height": 672, "width": 672})
"""Sizes in published files that their processor does not read."""
_LONG_SIDE = "max_long_side_pixel"
_OWN = ("image_processor_type", "auto_map", "processor_class", "min_pixels", "max_pixels", _LONG_SIDE)


def qwen_fields(fields: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """The same settings as arguments of the processor of Qwen2-VL; None: another model's.

    Raises:
        ConfigError: images are scaled by the length of their longer side.
    """
    remote = str((fields.get("auto_map") or {}).get("AutoImageProcessor", ""))
    if fields.get("image_processor_type") not in (TYPE, f"{TYPE}Fast") and TYPE not in remote:
        return None
    if fields.get(_LONG_SIDE):
        raise ConfigError(
            f"{source}: {_LONG_SIDE} is not supported; remove it, or serve the text alone with --language-model-only"
        )
    size = {} if fields.get("size") in (None, *_WRONG_SIZES) else dict(fields["size"])
    least = fields.get("min_pixels") or size.get("shortest_edge") or LEAST
    most = fields.get("max_pixels") or size.get("longest_edge") or MOST
    kept = {name: value for name, value in fields.items() if name not in _OWN}
    return kept | {"size": {"shortest_edge": least, "longest_edge": most}}
