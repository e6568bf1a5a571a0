"""Reads what torch.save wrote, executing nothing of it. Imports torch only when called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError


def load_tensors(path: Path, source: str) -> Any:
    """The tensors, numbers, text, lists and dicts in a file.

    Args:
        path: the file.
        source: what to call it in errors.

    Raises:
        ConfigError: there is no such file, it is cut short, or holds anything else.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from error
    except Exception as error:  # torch's unpickler stumbles over foreign bytes in many ways: KeyError, EOFError, ...
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ConfigError(f"{source}: not a file of torch.save that holds tensors, or cut short ({reason})") from error
