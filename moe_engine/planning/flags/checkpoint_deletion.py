"""Checkpoints that --delete-ckpt-after-loading cannot delete, because they are needed again or have another owner."""

from __future__ import annotations

from pathlib import Path

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.gguf_container import SUFFIX
from moe_engine.planning.inputs.checkpoint import embedded_model

FLAG = "--delete-ckpt-after-loading"


def check_deletion(args: EngineArgs, folder: Path) -> None:
    """Raises ConfigError with the reason.

    Args:
        folder: of the checkpoint, or its GGUF file.
    """
    model = args.model
    if not model.delete_ckpt_after_loading:
        return
    if folder.resolve() == embedded_model().resolve():
        raise ConfigError(f"{FLAG}: the embedded model belongs to this package; give --model-path, or drop the flag")
    if model.load_format == "dummy":
        raise ConfigError(f"{FLAG} with --load-format dummy: no files are loaded; drop one of them")
    if folder.suffix == SUFFIX and not model.skip_tokenizer_init and model.tokenizer_path is None:
        raise ConfigError(
            f"{FLAG}: {folder} holds the tokenizer too, which is read again while serving; give --tokenizer-path"
        )
