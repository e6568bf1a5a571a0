"""Names of the experts of Granite 3, whose matrices are common tensors of a layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".shared_mlp.input_linear.": ".block_sparse_moe.shared_mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".block_sparse_moe.shared_mlp.down_proj.",
}
"""Parts of published names, and of those in the model. Gate and up of the shared expert are joined by rows."""


def has_names(names: Collection[str]) -> bool:
    return any(".block_sparse_moe.input_linear." in name for name in names)


def inner_name(name: str) -> str:
    """The name in the model; of other tensors the same."""
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name
