"""Calls of C functions by a GPU's stream, between two launches: captured with them, and without a wait on the host."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_in_order(function: int, data: int, device: torch.device) -> None:
    """function(data), addresses of a C function of one pointer and of its argument, after the work that was launched
    on the current stream; work launched later waits for it. The function calls nothing of CUDA or Python.

    Raises:
        RuntimeError: the driver refuses.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    code = _driver().cuLaunchHostFunc(stream, ctypes.c_void_p(function), ctypes.c_void_p(data))
    if code:
        raise RuntimeError(f"CUDA error {code}: a function cannot be launched on the host")
