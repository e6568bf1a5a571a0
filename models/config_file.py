"""config.json -> `ModelConfig`, by the registry's parser for its architecture. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import SUFFIX, find_gguf
from moe_engine.models import registry
from moe_engine.models.checkpoint_names.mistral_native import PARAMS_FILE, native_fields, native_file
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_defaults import with_defaults
from moe_engine.models.config_sections.fields import Fields, is_whole, merge, read_json, text_fields
from moe_engine.models.gguf.config import gguf_fields


def load_model_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads `path`/config.json (and the eos ids of generation_config.json).

    Args:
        path: a Hugging Face checkpoint directory, a config.json, Mistral's params.json, or a GGUF file or its folder.
        overrides: fields that replace those of the file (--json-model-override-args), nested objects merged.

    Raises:
        ConfigError: no such file, not JSON, an unsupported architecture, a missing, mistyped or contradictory field.
    """
    file, original = read_fields(Path(path))
    raw = _with_quantization(file, text_fields(merge(original, overrides or {})))
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{file}: architectures must be a list of names, found {names!r}")
    architecture = registry.find(names, raw.get("model_type"), str(file))
    generation = file.parent / "generation_config.json"
    defaults = read_json(generation) if os.path.lexists(generation) else {}
    fields = with_defaults(raw) | {"architectures": [architecture.name]}
    config = architecture.parse(Fields(fields, str(file)), defaults)
    if not overrides:
        return config
    stored = text_fields(original).get("num_layers" if config.shortcut else "num_hidden_layers")
    if is_whole(stored) and (layers := int(stored) * (1 + config.shortcut)) != config.num_layers:
        config = dataclasses.replace(config, file_layers=layers)
    return config


def read_fields(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file with a model's config, and its fields: config.json, Mistral's params.json, or a GGUF file. Raises
    ConfigError."""
    gguf = find_gguf(path)
    if gguf is not None:
        return gguf, gguf_fields(gguf)
    native = path if path.name == PARAMS_FILE else native_file(path)
    if native is not None:
        return native, native_fields(native)
    file = path if path.suffix in (".json", SUFFIX) else path / "config.json"
    return file, read_json(file)


def _with_quantization(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields with the settings of hf_quant_config.json (ModelOpt), if config.json has none."""
    settings = file.parent / "hf_quant_config.json"
    if raw.get("quantization_config") is not None or not settings.is_file():
        return raw
    found = read_json(settings).get("quantization")
    if not isinstance(found, Mapping):
        raise ConfigError(f"{settings}: quantization must be an object, found {found!r}")
    return {**raw, "quantization_config": {"quant_method": "modelopt", **found}}
