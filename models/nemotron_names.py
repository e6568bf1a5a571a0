"""Names of Nemotron-H's tensors and modules as published, and here. Imports no torch.

A layer is one mixer: ``backbone.layers.N.mixer``. Its parts tell what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_OUTER = {"embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER = ".mixer"
_STATE = ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "k_scale", "v_scale")
_LATENT = {"fc1_latent_proj": "routed_expert_down_proj", "fc2_latent_proj": "routed_expert_up_proj"}


def has_names(names: Iterable[str]) -> bool:
    """Whether a tensor has a name of the family."""
    return any(name.startswith("backbone.") or f"{_MIXER}." in name for name in names)


def inner_name(name: str) -> str:
    """A name, or its beginning up to a whole part, as it is here; the name of a mixer stays."""
    if name.startswith("mtp."):
        return f"model.{name}"
    first, _, rest = name.partition(".")
    if first not in ("backbone", "model"):
        return name
    part, _, more = rest.partition(".")
    if part in _OUTER:
        return ".".join(filter(None, ("model", _OUTER[part], more)))
    layer, mixer, inside = rest.partition(_MIXER)
    if not inside:
        return f"model.{rest}" if mixer else f"model.{_with_norm(rest)}"
    part, _, more = inside.removeprefix(".").partition(".")
    block = "linear_attn" if part in _STATE else "self_attn" if part in _ATTENTION else "mlp"
    return ".".join(filter(None, ("model", layer, block, _LATENT.get(part, part), more)))


def _with_norm(rest: str) -> str:
    """``layers.N.norm.weight`` -> ``layers.N.input_layernorm.weight``."""
    parts = rest.split(".")
    if len(parts) > 2 and parts[2] == "norm":
        parts[2] = "input_layernorm"
    return ".".join(parts)


def quantization_names(section: Any) -> Any:
    """quantization_config with the modules as they are named here, in lists and as names of fields; regular expressions
    stay. A mixer in a list is each of the blocks that it may be."""
    if isinstance(section, Mapping):
        return {_named(key)[0]: quantization_names(value) for key, value in section.items()}
    if isinstance(section, list):
        return [new for old in section for new in (_named(old) if isinstance(old, str) else [quantization_names(old)])]
    return section


def _named(name: str) -> list[str]:
    inner = inner_name(name)
    outer, mixer, rest = inner.partition(_MIXER)
    if not mixer or rest not in ("", ".*", "*"):
        return [inner]
    return [f"{outer}.{block}{rest}" for block in ("linear_attn", "self_attn", "mlp")]
