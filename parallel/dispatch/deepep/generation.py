"""The DeepEP generation in use, by its classes: version numbers are unreliable (forks number differently)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Literal

from moe_engine.kernels.device import Device

Generation = Literal["ElasticBuffer", "Buffer"]
OF_VERSION: dict[str, Generation] = {"2": "ElasticBuffer", "1": "Buffer"}  # the newest first
VERSIONS = ("auto", *OF_VERSION)
"""Values of --deepep-version; auto: the newest in the library."""

HIDDEN_MULTIPLE = 256  # divides the channels of the second generation
QUEUE_DEPTH = 1024  # NVSHMEM_QP_DEPTH as set by `Buffer`
FIRST_GENERATION_TOKENS = QUEUE_DEPTH // 2 - 1
"""Max tokens of a rank in a low-latency dispatch of the first generation, by the library's NVSHMEM queue depth."""
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # of the first generation, as the next
LOW_LATENCY_TOP_K = 11  # kNumMaxTopK of the first generation's low-latency kernels; other kernels: a warp, 32


def generation_of(deep_ep: ModuleType, version: str = "auto") -> Generation:
    """The class of the version in the module.

    Raises:
        ValueError: the module has no such class.
    """
    wanted = tuple(OF_VERSION.values()) if version == "auto" else (OF_VERSION[version],)
    for name in wanted:
        if hasattr(deep_ep, name):
            return name
    if version != "auto":
        raise ValueError(f"--deepep-version {version}: {deep_ep.__name__} has no {wanted[0]}")
    raise ValueError(f"{deep_ep.__name__} has none of the known classes: {', '.join(wanted)}")


def why_not(device: Device, version: str = "auto") -> str | None:
    """The reason why DeepEP is unavailable, or None; does not import it."""
    if device.kind != "cuda":
        return f"DeepEP needs GPU memory; the device is {device.kind}"
    if importlib.util.find_spec("deep_ep") is None:
        if device.has_libraries:
            return None
        return "deep_ep is not installed (pip install 'sgl-deep-ep>=0.1.2.post1')"
    if version == "2" and not _has_second_generation():
        return "the installed deep_ep has no ElasticBuffer (--deepep-version 2)"
    return None


def why_not_hidden(version: str, hidden: int) -> str | None:
    """The reason why no kernel takes rows of `hidden` channels, or None."""
    if hidden % HIDDEN_MULTIPLE == 0 or is_first_generation(version):
        return None
    return f"DeepEP 2 sends multiples of {HIDDEN_MULTIPLE} channels, not {hidden}; use --moe-a2a-backend all_to_all"


def why_not_low_latency(version: str, hidden: int, top_k: int) -> str | None:
    """The reason why the low-latency kernels do not take these sizes (0: unknown), or None."""
    if not is_first_generation(version):
        return None
    if top_k > LOW_LATENCY_TOP_K:
        reason = f"at most top-{LOW_LATENCY_TOP_K} in low latency, not top-{top_k}"
    elif hidden and hidden not in LOW_LATENCY_HIDDEN:
        reason = f"{', '.join(map(str, LOW_LATENCY_HIDDEN))} channels in low latency, not {hidden}"
    else:
        return None
    newer = "" if why_not_hidden("2", hidden) or not _has_second_generation() else "--deepep-version 2, "
    return f"DeepEP 1 sends {reason}; use {newer}--deepep-mode normal or --moe-a2a-backend all_to_all"


def is_first_generation(version: str) -> bool:
    """True if `Buffer` is used; does not import the library."""
    installed = importlib.util.find_spec("deep_ep") is not None
    return version == "1" or (installed and version == "auto" and not _has_second_generation())


def _has_second_generation() -> bool:
    """By the `buffers` folder of the installed package, which the first generation alone lacks."""
    spec = importlib.util.find_spec("deep_ep")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any((Path(folder) / "buffers").is_dir() for folder in folders)
