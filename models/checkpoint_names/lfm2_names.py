"""Names of LFM2's tensors and modules as published, and here. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_NORM = "model.embedding_norm."
_PARTS = {
    f".{_NORM}": ".model.norm.", ".operator_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.", ".q_layernorm.": ".q_norm.", ".k_layernorm.": ".k_norm.",
    ".feed_forward.expert_bias.": ".mlp.gate.e_score_correction_bias.", ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.",
}  # fmt: skip


def has_names(names: Collection[str]) -> bool:
    """True if some of these are tensors of LFM2."""
    return any(name.startswith(_NORM) for name in names)


def inner_name(name: str) -> str:
    """A name, or a part of one between dots, as it is here."""
    name = f".{name}."
    for old, new in _PARTS.items():
        name = name.replace(old, new)
    return name[1:-1]
