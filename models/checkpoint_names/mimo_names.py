"""Names of the joined q, k and v of MiMo-V2.5, which other joined matrices have too, but not by groups. Imports no
torch."""

from __future__ import annotations

from collections.abc import Collection

from moe_engine.models.formats.joined_groups import GROUPS

_STORED = ".self_attn.qkv_proj."
_SINKS = ".self_attn.attention_sink_bias"


def has_groups(names: Collection[str]) -> bool:
    return any(name.endswith(_SINKS) for name in names) and any(_STORED in name for name in names)


def group_name(name: str) -> str:
    """The name in the model; of other tensors the same."""
    return name.replace(_STORED, f".self_attn.{GROUPS}.")
