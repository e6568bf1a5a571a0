"""Names of Gemma 4 -> the model's: the parts of a layer with experts are one block, whose MLP is the shared expert.
Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

_FACTOR = ".layer_scalar"
_SCALES = ".router.per_expert_scale"
_PARTS = {
    "pre_feedforward_layernorm.": "moe.pre_shared_norm.", "post_feedforward_layernorm_1.": "moe.post_shared_norm.",
    "pre_feedforward_layernorm_2.": "moe.pre_routed_norm.", "post_feedforward_layernorm_2.": "moe.post_routed_norm.",
    "router.proj.": "moe.gate.", "router.scale": "moe.router_norm.weight",
    "router.per_expert_scale": "moe.per_expert_scale", "experts.": "moe.experts.", "mlp.": "moe.shared_experts.",
}  # fmt: skip
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


def has_factors(names: Collection[str]) -> bool:
    return any(name.endswith(_FACTOR) for name in names)


def factor_name(name: str) -> str:
    """The name of a layer's factor as that of a weight."""
    return f"{name}.weight" if name.endswith(_FACTOR) else name


def has_names(names: Collection[str]) -> bool:
    """Whether the layers of Gemma 4 have experts."""
    return any(name.endswith(_SCALES) for name in names)


def inner_name(name: str) -> str:
    """The name in a model with experts; of other tensors and modules the same."""
    if (found := _LAYER.fullmatch(name)) is None:
        return name
    layer, part = found.groups()
    return next((f"{layer}{new}{part.removeprefix(old)}" for old, new in _PARTS.items() if part.startswith(old)), name)
