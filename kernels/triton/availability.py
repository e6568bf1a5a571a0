"""Availability of Triton rows on a device; imports neither torch nor Triton."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec

from moe_engine.kernels.device import Device
from moe_engine.kernels.kv_format.formats import E4M3, E4M3_TENSOR

DTYPES = ("bfloat16", "float16", "float32")
OLDEST = (8, 0)
OLDEST_WITH_E4M3 = (8, 9)
BLACKWELL = (10, 0)
OLDEST_WITH_BLACKWELL_MLA = (3, 9)


@lru_cache
def installed() -> bool:
    """True if ``import triton`` would find a module."""
    return find_spec("triton") is not None


def why_not(device: Device, dtype: str) -> str | None:
    """The reason Triton rows are unavailable, or None."""
    if device.no_cuda is not None:
        return device.no_cuda
    if not device.elsewhere and not installed():
        return "needs triton, which is not installed (pip install triton)"
    if device.capability is not None and device.capability < OLDEST:
        return f"needs compute capability 8.0, this device has {device.capability[0]}.{device.capability[1]}"
    if dtype not in DTYPES:
        return f"has no {dtype} kernels (only {', '.join(DTYPES)})"
    return None


@lru_cache
def version() -> tuple[int, int]:
    """Version of the installed Triton; (0, 0) if missing or unknown."""
    try:
        major, minor, *_ = metadata.version("triton").split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return 0, 0


def why_not_index_heads(width: int) -> str | None:
    """The reason Triton rows do not support an indexer's heads of that width, or None."""
    return None if width >= 16 else f"index heads of {width} channels (a matrix product needs 16)"


def why_not_latent(device: Device) -> str | None:
    """The reason Triton's MLA is unavailable, or None: before 3.9 the compiler needs 273 KiB of shared memory for its
    128-row tile on sm_100, where the limit per block is 227."""
    if device.elsewhere and not installed():
        return None
    if device.capability is not None and device.capability >= BLACKWELL and version() < OLDEST_WITH_BLACKWELL_MLA:
        return "needs Triton 3.9 for MLA on Blackwell, Triton {}.{} is installed".format(*version())
    return None


def why_not_cache(device: Device, kv_dtype: str) -> str | None:
    """The reason Triton rows do not support this KV cache dtype, or None."""
    capability = device.capability
    if kv_dtype in (E4M3, E4M3_TENSOR) and capability is not None and capability < OLDEST_WITH_E4M3:
        return f"converts e4m3 from compute capability 8.9 on, this device has {capability[0]}.{capability[1]}"
    return None
