"""Reads torch.save files without executing code. Imports torch only when called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError


def load_tensors(path: Path, source: str) -> Any:
    """The tensors, numbers, text, lists and dicts in a file.

    Args:
        path: the file.
        source: the file's name in errors.

    Raises:
        ConfigError: the file is missing, truncated, or has other contents.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if path.is_file() and os.access(path, os.R_OK):  # torch seeks before the start of a truncated file
            raise ConfigError(f"{source}: not a torch.save file of tensors, or truncated") from error
        raise ConfigError(f"{source}: {error.strerror or error}") from error
    except Exception as error:  # torch's unpickler raises many types for foreign bytes: KeyError, EOFError, ...
        raise ConfigError(f"{source}: not a torch.save file of tensors, or truncated") from error
