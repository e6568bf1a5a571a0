"""Names of Ling's tensors and modules as published, and here. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_EMBEDDING = "model.word_embeddings."
_PARTS = {
    ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias.": ".mlp.gate.e_score_correction_bias.", f".{_EMBEDDING}": ".model.embed_tokens.",
}  # fmt: skip


_JOINED = ".self_attn.query_key_value."
_GROUPED = {
    _JOINED: ".self_attn.qkv_proj.", ".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm.",
}  # fmt: skip
"""Parts of attention in Ling 2.0. Ling 2.6 has names like these in lightning attention, beside its gates."""


def has_names(names: Collection[str]) -> bool:
    """True if some of these are tensors of Ling."""
    return any(name.startswith(_EMBEDDING) for name in names)


def inner_name(name: str) -> str:
    """A name, or a part of one between dots, as it is here."""
    return _replaced(name, _PARTS)


def is_grouped(names: Collection[str]) -> bool:
    """True if some of these are tensors of Ling 2.0."""
    return any(_JOINED in name for name in names) and not any(".self_attn.g_proj." in name for name in names)


def grouped_name(name: str) -> str:
    """As `inner_name`, of Ling 2.0."""
    return _replaced(inner_name(name), _GROUPED)


def _replaced(name: str, parts: dict[str, str]) -> str:
    name = f".{name}."
    for old, new in parts.items():
        name = name.replace(old, new)
    return name[1:-1]
