"""Forks of a process that has used CUDA, as torch treats them: the new process cannot use a device, and looking for
devices counts as use.

Source: torch/csrc/cuda/Module.cpp, THCPModule_getDeviceCount_wrap; torch/cuda/__init__.py, _lazy_init.
"""

from __future__ import annotations

import os

LOOKS = ("is_available", "device_count")
"""Functions of ``torch.cuda`` after which a fork is unusable; they never raise."""
USES = (
    "current_device", "set_device", "get_device_properties", "get_device_name", "get_device_capability", "mem_get_info",
    "synchronize", "current_stream", "default_stream", "can_device_access_peer",
)  # fmt: skip
"""Functions that initialize CUDA."""

_used = _lost = False


def _forked() -> None:
    global _lost
    _lost = _used


os.register_at_fork(after_in_child=_forked)


def called(name: str) -> None:
    """A function of ``torch.cuda`` is called.

    Raises:
        RuntimeError: it needs CUDA in a process that was forked from a user of CUDA.
    """
    global _used
    _used = _used or name in LOOKS or name in USES
    if _lost and name in USES:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method"
        )
