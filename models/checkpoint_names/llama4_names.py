"""Names of Llama 4's dense layers: published as `feed_forward`, as the block of experts is. Imports no torch."""

from __future__ import annotations

import re

_DENSE = re.compile(r"(model\.layers\.\d+)\.feed_forward\.(?=(?:gate|up|down)_proj(?:\.|$))")
"""Not of Pixtral's tower (`transformer.layers`), which has the same names."""


def inner_name(name: str) -> str:
    """The name in the model; of other tensors and modules the same."""
    return _DENSE.sub(r"\1.mlp.", name)
