"""Reads the draft model of --speculative-draft-model-path, before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.checkpoint import locate
from moe_engine.planning.resolve_speculation import DraftModel

FLAG = "--speculative-draft-model-path"
# substring of the architecture's name -> kind of checkpoint
HEADS = {
    "eagle3": "an EAGLE-3 head (it reads hidden states of three of the model's layers)",
    "eagle": "an EAGLE head (one decoder layer on the model's hidden states)",
}
NEXTN = "NextN"
"""End of the architecture's name of an MTP layer exported on its own (SGLang's script exports DeepSeek's)."""


def load_draft(args: EngineArgs) -> DraftModel | None:
    """The draft model's folder and config; None if the flags name none.

    Raises:
        ConfigError: no checkpoint there, or one that this engine cannot run.
        NotAvailableYet: EAGLE heads.
    """
    path = args.speculative.speculative_draft_model_path
    if path is None or args.speculative.speculative_algorithm is None:
        return None
    is_local = os.path.exists(os.path.expanduser(path))
    folder = locate(path, download_dir=None if is_local else args.model.download_dir, flag=FLAG)
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{FLAG} {path}: no config.json there; give the folder of a checkpoint")
    names = _architectures(file)
    _refuse_heads(path, names)
    if any(name.endswith(NEXTN) for name in names):
        overrides = {"architectures": [name.removesuffix(NEXTN) for name in names], "num_nextn_predict_layers": 1}
        overrides |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        return DraftModel(str(folder), load_model_config(folder, overrides), is_nextn=True)
    return DraftModel(str(folder), load_model_config(folder))


def with_nextn(model: ModelConfig, draft: DraftModel | None) -> ModelConfig:
    """The model's config with the MTP layer of `draft`, if it is one.

    Raises:
        ConfigError: it was exported from another model.
    """
    if draft is None or not draft.is_nextn:
        return model
    ours, theirs = (_shape_of(config) for config in (model, draft.config))
    differing = [name for name in ours if ours[name] != theirs[name]]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{FLAG} {draft.path}: an MTP layer of another model: its {name} is {theirs[name]}, and that of "
            f"{model.source} is {ours[name]}"
        )
    return dataclasses.replace(model, num_nextn_predict_layers=1)


def _shape_of(config: ModelConfig) -> dict[str, Any]:
    """What a layer shares with the model whose hidden states it reads, by the fields of config.json."""
    return {
        "architectures": config.architecture, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "attention": config.attention, "experts": config.moe, "quantization_config": config.weight_format,
    }  # fmt: skip


def _architectures(file: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(file.read_text()).get("architectures") or []]
    except (ValueError, AttributeError, TypeError):
        return []  # load_model_config raises the error of the file


def _refuse_heads(path: str, names: list[str]) -> None:
    for name in names:
        found = next((what for part, what in HEADS.items() if part in name.lower()), None)
        if found is not None:
            raise NotAvailableYet(
                f"{FLAG} {path}: not supported yet: {name} is {found}; leave the flag out to draft with the MTP layers "
                "of the model's own checkpoint, or use STANDALONE with a complete small model"
            )
