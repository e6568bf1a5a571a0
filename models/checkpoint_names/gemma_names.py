"""Names of Gemma 4 -> the model's: experts and router are in the block of the MLP, which is the shared expert. A name
is changed whatever other names there are: trainers send some tensors. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

_FACTOR = ".layer_scalar"
_PARTS = {
    "post_feedforward_layernorm_1.": "mlp.post_shared_norm.", "pre_feedforward_layernorm_2.": "mlp.pre_routed_norm.",
    "post_feedforward_layernorm_2.": "mlp.post_routed_norm.", "router.proj.": "mlp.gate.",
    "router.scale": "mlp.router_norm.weight", "router.per_expert_scale": "mlp.per_expert_scale",
    "experts.": "mlp.experts.",
}  # fmt: skip
_LAYER = re.compile(r"(model\.layers\.\d+\.)((?:router|experts|(?:pre|post)_feedforward_layernorm_[12])\..+)")


def has_factors(names: Collection[str]) -> bool:
    return any(name.endswith(_FACTOR) for name in names)


def factor_name(name: str) -> str:
    """The name of a layer's factor as that of a weight."""
    return f"{name}.weight" if name.endswith(_FACTOR) else name


def has_names(names: Collection[str]) -> bool:
    """Whether there are names of Gemma 4's experts."""
    return any(_LAYER.match(name) for name in names)


def inner_name(name: str) -> str:
    """The name in a model with experts; of other tensors and modules the same."""
    if (found := _LAYER.fullmatch(name)) is None:
        return name
    layer, part = found.groups()
    return next((f"{layer}{new}{part.removeprefix(old)}" for old, new in _PARTS.items() if part.startswith(old)), name)
