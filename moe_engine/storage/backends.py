"""Storage backends by name (`--hicache-storage-backend`), or by the path of a user's class.

A maker gets (settings, rank): `StorageSettings`, and the number of the rank in its engine. A user's class is made with
the same arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from moe_engine.class_path import class_at
from moe_engine.errors import ConfigError
from moe_engine.storage.protocol import METHODS, PageStorage
from moe_engine.types.step_settings import StorageSettings

Maker = Callable[[StorageSettings, int], PageStorage]


def _file(settings: StorageSettings, rank: int) -> PageStorage:
    from moe_engine.storage.file_storage import FileStorage

    return FileStorage(settings.directory, settings.max_bytes)


def _nixl(settings: StorageSettings, rank: int) -> PageStorage:
    from moe_engine.storage.nixl_storage import NixlStorage

    return NixlStorage(settings.directory, settings.max_bytes, extra_of(settings))


def _mooncake(settings: StorageSettings, rank: int) -> PageStorage:
    from moe_engine.storage.mooncake_storage import MooncakeStorage

    return MooncakeStorage(extra_of(settings))


BACKENDS: dict[str, Maker] = {"file": _file, "nixl": _nixl, "mooncake": _mooncake}


def open_storage(settings: StorageSettings, rank: int = 0) -> PageStorage:
    """
    Raises:
        ConfigError: unknown backend, its package is missing, or it cannot be opened.
    """
    made = BACKENDS.get(settings.backend) or users_class(settings.backend)
    try:
        storage = made(settings, rank)
    except ConfigError:
        raise
    except Exception as error:  # of any backend
        raise ConfigError(
            f"--hicache-storage-backend {settings.backend}: cannot be opened: {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in METHODS if not callable(getattr(storage, name, None))]
    if missing:
        raise ConfigError(
            f"--hicache-storage-backend {settings.backend}: {type(storage).__name__} has no method {', '.join(missing)}"
        )
    return storage


def extra_of(settings: StorageSettings) -> dict[str, Any]:
    """`--hicache-storage-backend-extra-config`, without the settings of prefetching."""
    found: dict[str, Any] = json.loads(settings.extra) if settings.extra else {}
    return found


def users_class(path: str) -> Maker:
    """Raises ConfigError."""
    maker: Maker = class_at(path, "--hicache-storage-backend", BACKENDS)
    return maker
