"""Names of Granite's experts, whose matrices are common tensors of a layer, and of the parts of Granite 4's layers.
Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_EXPERTS = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".shared_mlp.input_linear.": ".block_sparse_moe.shared_mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".block_sparse_moe.shared_mlp.down_proj.",
}
"""Parts of published names, and of those in the model. Gate and up of the shared expert are joined by rows."""
_OF_EXPERTS = (
    ".block_sparse_moe.input_linear.", ".block_sparse_moe.router.layer.", ".block_sparse_moe.experts.gate_up_proj",
)  # fmt: skip
"""Of published files, of GGUF files, and of Granite with windows and sinks."""
_DENSE = {".shared_mlp.input_linear.": ".mlp.gate_up_proj.", ".shared_mlp.output_linear.": ".mlp.down_proj."}
"""The same of a model without experts."""
_STATE = {".mamba.": ".linear_attn."}


def has_experts(names: Collection[str]) -> bool:
    return any(part in name for name in names for part in _OF_EXPERTS)


def with_experts(name: str) -> str:
    """The name in the model; of other tensors the same."""
    return _replaced(name, _EXPERTS | _STATE)


def has_mlps(names: Collection[str]) -> bool:
    return any(".shared_mlp.input_linear." in name for name in names)


def with_mlps(name: str) -> str:
    """As `with_experts`."""
    return _replaced(name, _DENSE | _STATE)


def _replaced(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name
