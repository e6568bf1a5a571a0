"""Names of Nemotron-H's tensors and modules as published, and here. Imports no torch.

A layer is one mixer: ``backbone.layers.N.mixer``. Its parts tell what it is. An MTP layer is two of ``mtp.layers``,
attention and experts, and is one layer here, after the model's `first` ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from moe_engine.models.formats.module_rules import Modules

_OUTER = {"embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER = ".mixer"
_STATE = ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "k_scale", "v_scale")
_DRAFT = re.compile(r"(?:language_model\.)?mtp\.layers\.(\d+)\.(.+)")
_DRAFT_NORMS: tuple[dict[str, str], ...] = (
    {"norm": "input_layernorm"},
    {"norm": "post_attention_layernorm", "final_layernorm": "shared_head.norm"},
)
_DRAFT_MODULES = (
    ("eh_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj"),
    ("mixer.experts", "mixer.shared_experts", "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
"""Norms with other names here, and modules, of each of the two mixers of an MTP layer."""
_LATENT = {"fc1_latent_proj": "routed_expert_down_proj", "fc2_latent_proj": "routed_expert_up_proj"}


def has_nemotron_names(names: Collection[str]) -> bool:
    """Whether a tensor has a name of the family."""
    return any(name.startswith("backbone.") or f"{_MIXER}." in name for name in names)


def nemotron_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    """The model's names by those of a checkpoint.

    Args:
        num_layers: of the model; None: as many as there are tensors of.
    """
    if num_layers is None:
        found = (re.match(r"(?:backbone|model)\.layers\.(\d+)\.", name) for name in names)
        num_layers = 1 + max((int(match[1]) for match in found if match is not None), default=-1)
    return {name: inner_name(name, num_layers) for name in names}


def inner_name(name: str, count: int) -> str:
    """A name, or its beginning up to a whole part, as it is here; the name of a mixer stays. count: of the model's
    layers."""
    if (draft := _DRAFT.fullmatch(name)) is not None:
        place, is_second = divmod(int(draft[1]), 2)
        part, _, more = draft[2].partition(".")
        if part == _MIXER[1:]:
            inside, _, rest = more.partition(".")
            part, more = ("self_attn", "mlp")[is_second], ".".join(filter(None, (_LATENT.get(inside, inside), rest)))
        part = _DRAFT_NORMS[is_second].get(part, part)
        return ".".join(filter(None, ("model.layers", str(count + place), part, more)))
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


def quantization_names(section: Any, count: int, drafts: int = 0) -> Any:
    """quantization_config with the modules as they are named here, in lists and as names of fields; regular expressions
    stay. A mixer in a list is each of the blocks that it may be, and what names MTP layers is each of their modules.
    Of a model with `count` layers and `drafts` MTP layers."""
    if isinstance(section, Mapping):
        return {_named(key, count)[0]: quantization_names(value, count, drafts) for key, value in section.items()}
    if isinstance(section, list):
        texts = {old: _named(old, count) + _of_drafts(old, count, drafts) for old in section if isinstance(old, str)}
        each = (texts[old] if isinstance(old, str) else [quantization_names(old, count, drafts)] for old in section)
        return [new for found in each for new in found]
    return section


def _of_drafts(name: str, count: int, drafts: int) -> list[str]:
    """The modules of MTP layers that a name, pattern or regular expression with ``mtp`` means."""
    if "mtp" not in name:
        return []
    kinds = enumerate(_DRAFT_MODULES * drafts)
    modules = (f"mtp.layers.{i}.{module}" for i, listed in kinds for module in listed)
    return [inner_name(module, count) for module in modules if module in Modules((name,), (name,))]


def _named(name: str, count: int) -> list[str]:
    inner = inner_name(name, count)
    outer, mixer, rest = inner.partition(_MIXER)
    if not mixer or rest not in ("", ".*", "*"):
        return [inner]
    return [f"{outer}.{block}{rest}" for block in ("linear_attn", "self_attn", "mlp")]
