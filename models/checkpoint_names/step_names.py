"""Names of Step 3.5's and 3.7's tensors and modules as published, and here. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

_EXPERTS = re.compile(r"\.moe\.(gate|up|down)_proj(?:\.weight(?=$|_scale_inv$)|$)")
"""The matrices of all experts of a layer, in common tensors without ``weight``."""
_PARTS = {
    ".moe.gate": ".mlp.gate", ".moe.router_bias": ".mlp.gate.e_score_correction_bias", ".moe.experts": ".mlp.experts",
    ".share_expert.": ".mlp.shared_experts.", ".transformer.": ".", ".shared_head.output.": ".shared_head.head.",
}  # fmt: skip
_TOWER = ("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector.")


def has_names(names: Collection[str]) -> bool:
    """True if these are tensors of Step's layers."""
    return any(name.endswith(".moe.router_bias") or name.startswith("vit_large_projector.") for name in names)


def inner_name(name: str) -> str:
    """A name of a tensor or module."""
    if name.startswith(_TOWER):
        return f"visual.{name}"
    name = _EXPERTS.sub(r".mlp.experts.\1_proj", name)
    for old, new in _PARTS.items():
        name = name.replace(old, new)
    return name
