"""The installed DeepEP generation, by its classes: version numbers are unreliable (forks number differently)."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Literal

Generation = Literal["EPBuffer", "ElasticBuffer", "Buffer"]
NEWEST_FIRST: tuple[Generation, ...] = ("EPBuffer", "ElasticBuffer", "Buffer")


def generation_of(deep_ep: ModuleType, asked: str = "auto") -> Generation:
    """The newest generation in the module, or the requested one.

    Raises:
        ValueError: the module lacks it; the message lists its generations.
    """
    present = [name for name in NEWEST_FIRST if hasattr(deep_ep, name)]
    if asked == "auto" and present:
        return present[0]
    if asked in present:
        return NEWEST_FIRST[NEWEST_FIRST.index(asked)]  # type: ignore[arg-type]
    wanted = "any of " + ", ".join(NEWEST_FIRST) if asked == "auto" else asked
    raise ValueError(f"{deep_ep.__name__} has no {wanted}; it has {', '.join(present) or 'none of the known classes'}")


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
