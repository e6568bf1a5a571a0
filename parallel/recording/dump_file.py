"""Dump files: SGLang's names, written atomically."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from moe_engine.errors import MoeEngineError
from moe_engine.parallel.recording.config import DIRECTORY_VARIABLE


class RecordingError(MoeEngineError):
    """A dump could not be written; the message has the file and the fix. The recorded data are kept."""


def write_dump(directory: Path, content: dict[str, Any], rank: int | None) -> Path:
    """Saves `content` for ``torch.load(weights_only=True)``.

    Args:
        directory: created if missing.
        content: tensors, numbers, text, lists and dicts of them.
        rank: part of the name if every rank writes; None if one rank writes.

    Raises:
        RecordingError: the directory or the file cannot be written.
    """
    suffix = "" if rank is None else f"_{rank}"
    path = directory / f"expert_distribution_recorder_{time.time()}{suffix}.pt"
    partial = path.with_name(f".{path.name}.partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                torch.save(content, file)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        failed = error if isinstance(error, OSError) else error.__context__  # torch's RuntimeError after a failed write
        reason = getattr(failed, "strerror", None) or str(error).splitlines()[0]
        raise RecordingError(
            f"{path}: cannot be written ({reason}); no data were lost: free disk space and dump again, or start the "
            f"server with {DIRECTORY_VARIABLE} set to another directory"
        ) from error
    return path
