"""Names of Ling's tensors and modules as published, and here. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_EMBEDDING = "model.word_embeddings."
_PARTS = {
    ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias.": ".mlp.gate.e_score_correction_bias.", f".{_EMBEDDING}": ".model.embed_tokens.",
}  # fmt: skip


def has_names(names: Collection[str]) -> bool:
    """True if some of these are tensors of Ling."""
    return any(name.startswith(_EMBEDDING) for name in names)


def inner_name(name: str) -> str:
    """A name, or a part of one between dots, as it is here."""
    name = f".{name}."
    for old, new in _PARTS.items():
        name = name.replace(old, new)
    return name[1:-1]
