"""Reads the draft model of --speculative-draft-model-path, before torch is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.checkpoint import locate
from moe_engine.planning.resolve_speculation import DraftModel

FLAG = "--speculative-draft-model-path"
# substring of the architecture's name -> kind of checkpoint
HEADS = {
    "eagle3": "an EAGLE-3 head (it reads hidden states of three of the model's layers)",
    "eagle": "an EAGLE head (one decoder layer on the model's hidden states)",
    "nextn": "an MTP layer exported on its own",
}


def load_draft(args: EngineArgs) -> DraftModel | None:
    """The draft model's folder and config; None if the flags name none.

    Raises:
        ConfigError: no checkpoint there, or one that this engine cannot run.
        NotAvailableYet: EAGLE heads and exported MTP layers.
    """
    path = args.speculative.speculative_draft_model_path
    if path is None or args.speculative.speculative_algorithm is None:
        return None
    is_local = os.path.exists(os.path.expanduser(path))
    folder = locate(path, download_dir=None if is_local else args.model.download_dir, flag=FLAG)
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{FLAG} {path}: no config.json there; give the folder of a checkpoint")
    _refuse_heads(path, file)
    return DraftModel(str(folder), load_model_config(folder))


def _refuse_heads(path: str, file: Path) -> None:
    try:
        names = json.loads(file.read_text()).get("architectures") or []
    except (ValueError, AttributeError):
        return  # load_model_config raises the error of the file
    for name in map(str, names):
        found = next((what for part, what in HEADS.items() if part in name.lower()), None)
        if found is not None:
            raise NotAvailableYet(
                f"{FLAG} {path}: not supported yet: {name} is {found}; leave the flag out to draft with the MTP layers "
                "of the model's own checkpoint, or use STANDALONE with a complete small model"
            )
