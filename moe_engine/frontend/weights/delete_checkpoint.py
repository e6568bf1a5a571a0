"""--delete-ckpt-after-loading: removes the weight files of a checkpoint once all ranks have loaded them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from moe_engine.models.checkpoint_files import INDEX_FILE, TORCH_INDEX_FILE, read_checkpoint
from moe_engine.planning.resolved_config import ResolvedConfig

logger = logging.getLogger(__name__)


def delete_checkpoint(config: ResolvedConfig) -> None:
    """With the flag: removes the files that the loader has read, and their index; config and tokenizer are kept.

    Files that cannot be removed are logged, and serving continues.
    """
    if not config.args.model.delete_ckpt_after_loading:
        return
    folder = Path(config.model_path)
    files = {file.path for file in read_checkpoint(folder, config.args.model.load_format).values()}
    size, kept = remove(files)
    remove(path for path in (folder / INDEX_FILE, folder / TORCH_INDEX_FILE) if path.is_file())
    deleted = f"deleted {len(files) - len(kept)} weight files of {folder}, {size / 1e9:.2f} GB"
    logger.info("--delete-ckpt-after-loading: %s", deleted)
    for error in kept:
        logger.warning("--delete-ckpt-after-loading: %s: %s", error.filename, error.strerror)


def remove(paths: Iterable[Path]) -> tuple[int, list[OSError]]:
    """Removes files: (bytes removed, errors). For a link to a blob of the hub's cache also the blob; other targets of
    links are kept."""
    size, errors = 0, list[OSError]()
    for path in paths:
        try:
            target = path.resolve(strict=True)
            owned = not path.is_symlink() or target.parent.name == "blobs"
            size += target.stat().st_size if owned else 0
            path.unlink()
            if owned:
                target.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    return size, errors
