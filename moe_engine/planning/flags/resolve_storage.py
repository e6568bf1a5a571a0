"""Resolves storage below the host-RAM tier of the KV cache (`--hicache-storage-backend`)."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.memory import MemoryArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.resolution_log import Record
from moe_engine.storage.backends import BACKENDS, users_class
from moe_engine.storage.mooncake_storage import settings_in, settings_of
from moe_engine.types.step_settings import StorageSettings

STORAGE_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
EXTRA = "--hicache-storage-backend-extra-config"
NUMBERS = {"prefetch_threshold": 256, "prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.25}
PAGE = 64
"""Most tokens of a page without --page-size: a page is a file, or an object."""


def storage_problems(args: EngineArgs) -> Iterator[str]:
    """Reasons for refusing these flags."""
    memory = args.memory
    if memory.hicache_storage_backend is None:
        return
    if not memory.enable_hierarchical_cache:
        yield (
            f"--hicache-storage-backend {memory.hicache_storage_backend} is below the host-RAM tier; add "
            "--enable-hierarchical-cache"
        )
    if memory.hicache_storage_size < 0:
        yield f"--hicache-storage-size {memory.hicache_storage_size:g}: must not be negative"
    if memory.hicache_storage_backend not in BACKENDS:
        users_class(memory.hicache_storage_backend)
    extra = read_extra(memory)
    if memory.hicache_storage_backend == "file" and (unknown := sorted(set(extra) - set(NUMBERS))):
        yield f"{EXTRA}: {unknown[0]}: unknown; the file backend has {', '.join(NUMBERS)}, and --hicache-storage-dir"
    for name in NUMBERS:
        value = extra.get(name, NUMBERS[name])
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            yield f"{EXTRA}: {name} {value!r:.40}: must be a number of at least 0"


def read_extra(memory: MemoryArgs) -> dict[str, Any]:
    """Raises ConfigError: the value is not a JSON object, or names no file."""
    given = memory.hicache_storage_backend_extra_config
    if not given:
        return {}
    try:
        text = Path(given[1:]).read_text() if given.startswith("@") else given
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{EXTRA} {given:.80}: {error}; give a JSON object, or @FILE with one") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{EXTRA} {given:.80}: not a JSON object")
    return found


def with_storage_page(args: EngineArgs, fits: Callable[[EngineArgs, int], bool], record: Record) -> EngineArgs:
    """The page size that storage needs, unless it is given; notes the write policy.

    Args:
        fits: whether the sizes given by flags are possible with a page size.
    """
    if args.memory.hicache_write_policy == "auto":
        why = "no storage below it" if args.memory.hicache_storage_backend is None else "storage has all cached pages"
        record.note("hicache_write_policy", resolve_write_policy(args), why)
    if args.memory.hicache_storage_backend is None or args.memory.page_size is not None:
        return args
    sizes = (PAGE >> halved for halved in range(PAGE.bit_length()))
    page = record.note("page_size", next(size for size in sizes if fits(args, size)), "storage keeps pages of tokens")
    return dataclasses.replace(args, memory=dataclasses.replace(args.memory, page_size=page))


def resolve_write_policy(args: EngineArgs) -> str:
    policy = args.memory.hicache_write_policy
    if policy != "auto":
        return policy
    return "write_through" if args.memory.hicache_storage_backend is not None else "write_back"


def storage_settings(args: EngineArgs, environ: Mapping[str, str]) -> StorageSettings | None:
    """None without storage. Raises ConfigError as `read_extra`."""
    memory = args.memory
    if memory.hicache_storage_backend is None:
        return None
    extra = read_extra(memory)
    numbers = {name: extra.pop(name, value) for name, value in NUMBERS.items()}
    if memory.hicache_storage_backend == "mooncake":
        extra = settings_in(environ) | extra
        settings_of(extra)
    own = os.path.join(tempfile.gettempdir(), f"hicache-{os.getuid()}")
    return StorageSettings(
        memory.hicache_storage_backend,
        os.path.abspath(os.path.expanduser(memory.hicache_storage_dir or environ.get(STORAGE_VARIABLE) or own)),
        int(memory.hicache_storage_size * 1e9),
        json.dumps(extra) if extra else "",
        memory.hicache_storage_prefetch_policy,
        int(numbers["prefetch_threshold"]),
        float(numbers["prefetch_timeout_base"]),
        float(numbers["prefetch_timeout_per_ki_token"]),
    )
