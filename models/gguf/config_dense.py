"""Metadata of GGUF files of dense families that differ from Llama in norms or positions -> fields of config.json.
Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.gguf.keys import Keys, windows


def olmo2_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """OLMo 2, and with windows OLMo 3: files of both have the same architecture."""
    found = _windows(keys, common)
    return found | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} if found else {}


def exaone4_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """EXAONE 4: files of the 1.2B have no windows."""
    return _windows(keys, common)


def cohere2_fields(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Cohere 2: converters leave out the kinds of layers, which all published models share."""
    keys.need("attention.sliding_window")
    scale = {"logit_scale": keys.need("logit_scale"), "layer_norm_eps": common["rms_norm_eps"]}
    return _windows(keys, common) | scale


def _windows(keys: Keys, common: Mapping[str, Any]) -> dict[str, Any]:
    """Windows in three of four layers if the file has no list, with the rotary base of the other layers."""
    if not keys.get("attention.sliding_window"):
        return {}
    if keys.get("rope.freq_base_swa", common["rope_theta"]) != common["rope_theta"]:
        name = f"{keys.architecture}.rope.freq_base_swa"
        raise ConfigError(
            f"{keys.path}: {name} is not the base of layers without a window; use the model's safetensors"
        )
    return windows(keys, common["num_hidden_layers"], 4)
