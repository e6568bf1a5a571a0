"""Reads the draft model of --speculative-draft-model-path, before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.checkpoint_files import read_head
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.drafts.token_map import read_token_map
from moe_engine.models.eagle_config import HeadConfig, is_head, read_head_config
from moe_engine.models.header_check import with_stored_format
from moe_engine.planning.inputs.checkpoint import latent_scales, locate
from moe_engine.planning.speculation.resolve_speculation import DraftModel

FLAG = "--speculative-draft-model-path"
NEXTN = "NextN"
"""End of the architecture's name of an MTP layer exported on its own (SGLang's script exports DeepSeek's)."""


def load_draft(args: EngineArgs, model: ModelConfig) -> DraftModel | None:
    """The draft model's folder and config; None if the flags name none.

    Args:
        model: the model that it drafts for.

    Raises:
        ConfigError: the folder has no checkpoint, or one that this engine cannot run.
        CheckpointError: the weight files of an EAGLE head are damaged.
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
    if any(name.endswith(NEXTN) for name in names):
        if model.mtp.own_heads or model.lone_feed_forwards is not None:
            raise ConfigError(
                f"{FLAG} {path}: MTP layers of {model.architecture} exported on their own are not supported; leave the "
                "flag out: those of the model's checkpoint draft"
            )
        overrides = {"architectures": [name.removesuffix(NEXTN) for name in names], "num_nextn_predict_layers": 1}
        overrides |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        return DraftModel(str(folder), load_model_config(folder, overrides), is_nextn=True)
    files = {} if args.model.load_format == "dummy" else read_head(folder)
    if not is_head(names, files):
        config = with_stored_format(load_model_config(folder), files)
        return DraftModel(str(folder), config, latent_scales=latent_scales(files))
    head = _with_map(read_head_config(folder, files, model.num_layers), args, model)
    return DraftModel(str(folder), head.layer, head=head, latent_scales=latent_scales(files))


def _with_map(head: HeadConfig, args: EngineArgs, model: ModelConfig) -> HeadConfig:
    """The draft model with the tokens of --speculative-token-map. A head with an LM head of its own has its own
    tokens."""
    path = args.speculative.speculative_token_map
    if path is None or head.own_head:
        return head
    return dataclasses.replace(head, token_map=path, num_mapped=len(read_token_map(path, model.vocab_size)))


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
    """The sizes that a layer shares with the model whose hidden states it reads, by the fields of config.json."""
    return {
        "architectures": config.architecture, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "attention": config.attention, "experts": config.moe, "quantization_config": config.weight_format,
    }  # fmt: skip


def _architectures(file: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(file.read_text()).get("architectures") or []]
    except (ValueError, AttributeError, TypeError):
        return []  # load_model_config raises the error of the file
