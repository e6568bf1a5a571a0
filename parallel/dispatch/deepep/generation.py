"""The installed DeepEP generation, by its classes: version numbers are unreliable (forks number differently)."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Literal

Generation = Literal["EPBuffer", "ElasticBuffer", "Buffer"]
NEWEST_FIRST: tuple[Generation, ...] = ("EPBuffer", "ElasticBuffer", "Buffer")


QUEUE_DEPTH = 1024  # NVSHMEM_QP_DEPTH as set by `Buffer`
FIRST_GENERATION_TOKENS = QUEUE_DEPTH // 2 - 1
"""Max tokens of a rank in a low-latency dispatch of the first generation, by the library's NVSHMEM queue depth."""


def generation_of(deep_ep: ModuleType) -> Generation:
    """The newest generation in the module.

    Raises:
        ValueError: the module has none.
    """
    for name in NEWEST_FIRST:
        if hasattr(deep_ep, name):
            return name
    raise ValueError(f"{deep_ep.__name__} has none of the known classes: {', '.join(NEWEST_FIRST)}")


def load() -> ModuleType:
    """The installed library."""
    return importlib.import_module("deep_ep")


def why_not(device_kind: str) -> str | None:
    """The reason why DeepEP is unavailable, or None; does not import it."""
    if device_kind != "cuda":
        return f"DeepEP needs GPU memory; the device is {device_kind}"
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed (pip install 'sgl-deep-ep>=0.1.2.post1')"
    return None


def is_first_generation() -> bool:
    """True if the installed library only has `Buffer`; does not import it. Later ones have a `buffers` folder."""
    spec = importlib.util.find_spec("deep_ep")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return bool(folders) and not any((Path(folder) / "buffers").is_dir() for folder in folders)
