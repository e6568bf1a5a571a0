"""Permanent errors: after an illegal address every call on a device of this process fails, as in CUDA."""

from __future__ import annotations

import os

import torch

BREAKS = "SIMULATED_CUDA_BREAKS"
"""Environment variable: the kernel whose launches fail. Launched work continues; waits for it raise."""

_broken = False


def launched(kernel: str) -> None:
    """A kernel was launched."""
    global _broken
    _broken = _broken or kernel == os.environ.get(BREAKS)


def raise_broken() -> None:
    """Called by every call that uses the device.

    Raises:
        torch.AcceleratorError: the device is lost to this process.
    """
    if _broken:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
