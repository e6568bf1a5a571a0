"""Names of Ling's tensors and modules as published, and here. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EMBEDDING = "model.word_embeddings."
_PARTS = {
    ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias.": ".mlp.gate.e_score_correction_bias.", f".{EMBEDDING}": ".model.embed_tokens.",
}  # fmt: skip


def ling_name(name: str) -> str:
    """A name, or a part of one between dots, as it is here."""
    name = f".{name}."
    for old, new in _PARTS.items():
        name = name.replace(old, new)
    return name[1:-1]


def quantization_names(section: Mapping[str, Any]) -> dict[str, Any]:
    """quantization_config with the modules of its lists as they are named here; regular expressions stay."""

    def named(value: Any) -> Any:
        return ling_name(value) if isinstance(value, str) and not value.startswith("re:") else value

    return {key: list(map(named, value)) if isinstance(value, list) else value for key, value in section.items()}
