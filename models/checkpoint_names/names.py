"""Names of a checkpoint's tensors and modules -> the model's. Imports no torch.

The model has the names of DeepSeek-V3 as transformers saves it, and a vision tower under ``visual.``. `_FAMILIES` has
the families with other names for most tensors. The names of other families differ in parts: `_STEPS` are applied one
after the other, then the names of MTP layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, NamedTuple

from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_names import (
    gemma_names,
    granite_names,
    lfm2_names,
    ling_names,
    llama4_names,
    mimo_names,
    step_names,
)
from moe_engine.models.checkpoint_names.deepseek_v4_names import has_v4_names, v4_names
from moe_engine.models.checkpoint_names.longcat_names import has_longcat_names, longcat_names
from moe_engine.models.checkpoint_names.mistral_native import has_native_names, native_names
from moe_engine.models.checkpoint_names.nemotron_names import has_nemotron_names, nemotron_names

_OUTER = {
    "model.language_model.": "model.", "model.visual.": "visual.",
    "language_model.": "", "vision_tower.encoder.patch_embed.": "visual.patch_embed.",
    "vision_tower.vision_model.": "visual.", "vision_tower.": "visual.",
    "mm_projector.": "visual.mm_projector.", "model.mm_projector.": "visual.mm_projector.",
    "multi_modal_projector.": "visual.projector.", "model.multi_modal_projector.": "visual.projector.",
    "model.vision_tower.": "visual.", "patch_merge_mlp.": "visual.merge_mlp.",
    "vision_model.": "visual.", "model.embed_vision.": "visual.projector.",
}  # fmt: skip
"""Prefixes of models for images and text: as transformers names their parts since 4.52; Kimi K2.5's, Mistral's and
MiniMax-M3's, as published and as transformers saves them."""
_BODY = ("embed_tokens.", "layers.", "norm.")
"""Prefixes of a model that was saved without a head."""
_DENSE_AS_MOE = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""The MLP of a dense layer as transformers saves Kimi Linear's."""
_STREAMS = re.compile(r"\.hc_(attn|ffn)_(?=(?:fn|base|scale)$)")
"""Weights of residual streams in GLM-5.3-Flash."""
_QWEN_MTP = "mtp."
_QWEN_PARTS = {
    "fc": "eh_proj", "fc_embedding": "e_proj", "fc_hidden": "h_proj",
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm", "hyper_connection_mixer": "shared_head.hyper_connection_mixer",
}  # fmt: skip
_MINIMAX_MTP = re.compile(r"(?:model\.)?mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")
_MINIMAX_BLOCK = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
_MIMO_MTP = re.compile(r"model\.mtp_layers\.(\d+)\.([^.]+)\.(.+)")
_MIMO_PARTS = {
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}  # fmt: skip
_LAST_NORM = "model.norm.weight"
_HY3_NORM = ".final_layernorm.weight"
_ERNIE_MTP = "model.mtp_"
_ERNIE_PARTS = {"emb_norm": "enorm.", "hidden_norm": "hnorm.", "linear_proj": "eh_proj.", "block": ""}
_HEAD_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
"""Older names of the norms of an EAGLE-3 head's three states."""


def with_model_names(files: dict[str, WeightFile], num_layers: int | None) -> dict[str, WeightFile]:
    """The tensors under the model's names.

    Args:
        num_layers: main layers of the model; None: as many as there are tensors of.
    """
    names = next(family.names for family in _FAMILIES if family.applies(files))(files, num_layers)
    found = renamed(files, {old: new for old, new in names.items() if new != old})
    _cut_rates(found)
    _add_ernies_norms(found, names)
    return found


def renamed(files: dict[str, WeightFile], names: Mapping[str, str]) -> dict[str, WeightFile]:
    """The same tensors with new `names`, old -> new."""
    if not names:
        return files
    each = {id(file): file for file in files.values()}  # once, not for each of its tensors
    changed = {key: _with_names(file, names) for key, file in each.items()}
    return {names.get(name, name): changed[id(file)] for name, file in files.items()}


def renamed_modules(section: Mapping[str, Any], inner_name: Callable[[str], str]) -> dict[str, Any]:
    """`quantization_config` with the modules of its lists under the model's names; regular expressions stay."""

    def named(value: Any) -> Any:
        return inner_name(value) if isinstance(value, str) and not value.startswith("re:") else value

    return {key: list(map(named, value)) if isinstance(value, list) else value for key, value in section.items()}


def head_name(name: str) -> str:
    """The name of a tensor of an EAGLE head: its first layer is ``model.layers.0``, others have no prefix."""
    name = name.removeprefix("model.")
    for old, new in _HEAD_NORMS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    if name.startswith("midlayer."):
        return f"model.layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith("layers.") else name


def _always(names: Collection[str]) -> bool:
    return True


def _has_outer(names: Collection[str]) -> bool:
    return any(name.startswith(tuple(_OUTER)) for name in names)


def _without_outer(name: str) -> str:
    for outer, inner in _OUTER.items():
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name


def _has_no_head(names: Collection[str]) -> bool:
    return f"{_BODY[0]}weight" in names


def _with_model(name: str) -> str:
    return f"model.{name}" if name.startswith(_BODY) else name


def _part_of_layer(name: str) -> str:
    """Parts of layers that one family names otherwise."""
    return llama4_names.inner_name(_DENSE_AS_MOE.sub(".mlp.", _STREAMS.sub(r".hc_\1.", name)))


_STEPS: tuple[tuple[Callable[[Collection[str]], bool], Callable[[str], str]], ...] = (
    (step_names.has_names, step_names.inner_name),
    (_has_outer, _without_outer),
    (_has_no_head, _with_model),
    (_always, _part_of_layer),
    (lfm2_names.has_names, lfm2_names.inner_name),
    (ling_names.has_names, ling_names.inner_name),
    (ling_names.is_grouped, ling_names.grouped_name),
    (mimo_names.has_groups, mimo_names.group_name),
    (granite_names.has_experts, granite_names.with_experts),
    (granite_names.has_mlps, granite_names.with_mlps),
    (gemma_names.has_factors, gemma_names.factor_name),
    (gemma_names.has_names, gemma_names.inner_name),
)
"""Whether names differ, and the name of each tensor then."""


def _common_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    found = dict(zip(names, names))
    for applies, inner_name in _STEPS:
        if applies(found.values()):
            found = {stored: inner_name(name) for stored, name in found.items()}
    drafts = _mtp_names(found.values(), num_layers)
    return {stored: drafts.get(name, name) for stored, name in found.items()}


class _Family(NamedTuple):
    """
    Attributes:
        applies: whether the tensors with these names are of the family.
        names: the model's names by these, with the number of main layers as in `with_model_names`.
    """

    applies: Callable[[Collection[str]], bool]
    names: Callable[[Collection[str], int | None], Mapping[str, str]]


_FAMILIES = (
    _Family(has_v4_names, v4_names),
    _Family(has_native_names, native_names),
    _Family(has_nemotron_names, nemotron_names),
    _Family(has_longcat_names, longcat_names),
    _Family(_always, _common_names),
)
"""The first one that applies."""


def _mtp_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    """MTP layers with other names (Qwen: ``mtp.``, ERNIE: ``model.mtp_``, MiniMax-M3: ``model.mtp.layers.``, MiMo-7B:
    ``model.mtp_layers.``, the norm of Hy3's and Ling's), under DeepSeek's names after the last main layer."""
    first = _num_layers(names) if num_layers is None else num_layers
    if any(_MINIMAX_BLOCK.search(name) for name in names):
        return _minimax_names(names, first)
    if of_mimo := {name: found for name in names if (found := _MIMO_MTP.fullmatch(name)) is not None}:
        parts = {name: (first + int(found[1]), _MIMO_PARTS.get(found[2], found[2])) for name, found in of_mimo.items()}
        return {name: f"model.layers.{layer}.{part}.{of_mimo[name][3]}" for name, (layer, part) in parts.items()}
    if any(name.startswith(_ERNIE_MTP) for name in names):
        return _ernie_names(names, first)
    if any(name.startswith(_QWEN_MTP) for name in names):
        return _qwen_names(names, first)
    norms = [name for name in names if name.startswith("model.layers.") and name.endswith(_HY3_NORM)]
    return {name: name.replace(_HY3_NORM, ".shared_head.norm.weight") for name in norms}


def _num_layers(names: Collection[str]) -> int:
    main = [name.split(".")[2] for name in names if name.startswith("model.layers.")]
    return 1 + max((int(part) for part in main if part.isdigit()), default=-1)


def _minimax_names(names: Collection[str], first: int) -> dict[str, str]:
    found = {}
    for name in names:
        if (match := _MINIMAX_MTP.fullmatch(name)) is not None:
            rest = match[2].replace("final_layernorm.", "shared_head.norm.")
            found[name] = f"model.layers.{first + int(match[1])}.{rest}"
    return found


def _ernie_names(names: Collection[str], first: int) -> dict[str, str]:
    """``model.mtp_PART.J.``: part of MTP layer J."""
    found = {}
    for name in names:
        part, _, rest = name.removeprefix(_ERNIE_MTP).partition(".")
        index, _, rest = rest.partition(".")
        if name.startswith(_ERNIE_MTP) and part in _ERNIE_PARTS and index.isdigit():
            found[name] = f"model.layers.{first + int(index)}.{_ERNIE_PARTS[part]}{rest}"
    return found


def _qwen_names(names: Collection[str], first: int) -> dict[str, str]:
    """``mtp.``: one layer, whose block is ``mtp.layers.0``."""
    layer, found = f"model.layers.{first}", {}
    for name in [name for name in names if name.startswith(_QWEN_MTP)]:
        part, _, rest = name.removeprefix(_QWEN_MTP).partition(".")
        if part in _QWEN_PARTS:
            found[name] = f"{layer}.{_QWEN_PARTS[part]}.{rest}"
        elif part == "layers":
            found[name] = f"{layer}.{rest.removeprefix('0.')}"
    return found


def _add_ernies_norms(files: dict[str, WeightFile], names: Mapping[str, str]) -> None:
    """The last norm of ERNIE's MTP layers is the model's (as in FastDeploy's layers)."""
    norms = [new for old, new in names.items() if old.startswith(f"{_ERNIE_MTP}emb_norm.")]
    if (file := files.get(_LAST_NORM)) is not None:
        for name in [norm.replace(".enorm.", ".shared_head.norm.") for norm in norms]:
            file.tensors[name], file.stored_names[name] = file.tensors[_LAST_NORM], file.stored_name(_LAST_NORM)
            files[name] = file


def _cut_rates(files: dict[str, WeightFile]) -> None:
    """Kimi K3 stores rates of decay for more heads than its layers have: the headers end with the last head's."""
    for name in [name for name in files if name.endswith(".self_attn.A_log")]:
        file, block = files[name], name.removesuffix("A_log")
        bias, norm = (files.get(f"{block}{part}") for part in ("dt_bias", "o_norm.weight"))
        found = file.tensors[name]
        if len(found.shape) > 1 or bias is None or norm is None:
            continue
        each, (width,) = found.num_bytes // found.shape[0], norm.tensors[f"{block}o_norm.weight"].shape
        heads = prod(bias.tensors[f"{block}dt_bias"].shape) // width
        if found.shape[0] > heads:
            file.tensors[name] = found._replace(shape=(heads,), stop=found.start + heads * each)


def _with_names(file: WeightFile, names: Mapping[str, str]) -> WeightFile:
    tensors = {names.get(name, name): tensor for name, tensor in file.tensors.items()}
    stored = {names.get(name, name): file.stored_name(name) for name in file.tensors}
    return WeightFile(file.path, tensors, {name: old for name, old in stored.items() if name != old})
