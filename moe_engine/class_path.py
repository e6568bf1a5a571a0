"""Users' classes by their path in a flag: ``package.module:Class`` or ``package.module.Class``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from moe_engine.errors import ConfigError


def class_at(path: str, flag: str, names: Iterable[str]) -> Any:
    """The class. `names`: the other values of the flag. Raises ConfigError."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise ConfigError(
            f"{flag} {path!r:.100}: unknown; use {', '.join(names)}, or the path of a class as package.module:Class"
        )
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # of any code in the module
        raise ConfigError(f"{flag} {path}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{flag} {path}: not a class")
    return found
