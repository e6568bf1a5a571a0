"""Availability of the C++ rows on this machine; imports neither torch nor the compiled library."""

from __future__ import annotations

from moe_engine.kernels.device import Device

DTYPES = ("bfloat16", "float32")


def why_not(device: Device, dtype: str) -> str | None:
    """The reason the C++ rows are unavailable, or None."""
    if device.kind != "cpu":
        return f"runs on the CPU, the model on {device.kind}"
    if dtype not in DTYPES:
        return f"has no {dtype} kernels (only {', '.join(DTYPES)})"
    if device.compiler is None:
        return "needs a C++ compiler (g++ or clang++) on PATH, found none"
    return None
