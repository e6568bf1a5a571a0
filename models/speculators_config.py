"""The config.json of heads in the format of the speculators library (vLLM): the fields of published heads, from those
that the library nests or names differently. Imports no torch.

`transformer_layer_config` has the fields of the decoder layers. Hidden states are counted by the layer whose input is
read, also those of DFlash and DSpark. A block has one draft less than tokens unless `sample_from_anchor` is set: then
its first output predicts the next token, as in DeepSpec's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_engine.errors import ConfigError

_LAYERS = {"llama": "Llama", "qwen3": "Qwen3"}
"""Families of decoder layers, by model_type."""
_EAGLE3 = (
    "draft_vocab_size", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
_BLOCK = ("draft_vocab_size", "block_size", "mask_token_id", "target_hidden_size")
_MARKOV = ("markov_rank", "markov_head_type")
_WINDOWS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers", "is_causal")
"""Fields that some files have next to `transformer_layer_config`."""
_BLOCKS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether these are the fields of a head in the library's format."""
    return "transformer_layer_config" in raw or bool(raw.get("speculators_model_type"))


def published_fields(file: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as z-lab, DeepSpec and SGLang publish them, for `models.eagle_config`.

    Raises:
        ConfigError: a field is missing or has another type, or the drafter is not supported.
    """
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ConfigError(f"{file}: transformer_layer_config must be an object, found {layer!r}")
    family = layer.get("model_type", "llama" if kind == "eagle3" else "qwen3")
    if family not in _LAYERS:
        raise ConfigError(
            f"{file}: transformer_layer_config.model_type {family}: the layers of a head in this format must be those "
            f"of {', '.join(_LAYERS)}"
        )
    fields = {**layer, "model_type": family}
    if kind == "eagle3":
        own = {name: raw[name] for name in _EAGLE3 if raw.get(name) is not None}
        # vLLM's value where the file has none
        own["norm_before_residual"] = raw.get("norm_before_residual", True)
        return {**fields, **own, "architectures": [f"{_LAYERS[family]}ForCausalLMEagle3"]}
    if kind not in _BLOCKS:
        raise ConfigError(
            f"{file}: speculators_model_type {kind}: heads in the format of the speculators library must be of "
            f"eagle3, {', '.join(_BLOCKS)}"
        )
    if raw.get("projector_type", "dflash") != "dflash":
        raise ConfigError(f"{file}: projector_type {raw['projector_type']}: not supported; use a head with dflash")
    fields |= {name: raw[name] for name in (*_BLOCK, *_WINDOWS) if raw.get(name) is not None}
    if kind == "dspark":
        fields |= {name: raw[name] for name in _MARKOV if name in raw}
    layers = _integers(file, raw, "aux_hidden_state_layer_ids")
    return {
        **fields,
        "architectures": [_BLOCKS[kind]],
        "target_layer_ids": [i - 1 for i in layers],
        "sample_from_anchor": _samples_from_anchor(raw),
        "sliding_window_non_causal": bool(raw.get("sliding_window_non_causal")),
    }


def _samples_from_anchor(raw: Mapping[str, Any]) -> bool:
    """Whether the first output of a block is a draft; files without the field tell it by the number of drafts."""
    given = raw.get("sample_from_anchor")
    if given is not None:
        return bool(given)
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    drafts = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return drafts is not None and drafts == raw.get("block_size")


def _integers(file: str, raw: Mapping[str, Any], name: str) -> list[int]:
    found = raw.get(name)
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise ConfigError(f"{file}: {name} must be a list of layers, found {found!r}")
    return found
