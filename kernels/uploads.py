"""Host-to-device copies without host synchronization."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """A pinned host tensor, copied asynchronously: a copy from pageable memory waits for all queued device work."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if _pins(device) else tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; no host synchronization.

    Raises:
        RuntimeError: the current stream is captured. Each replay would copy from host memory that is free by then.
    """
    tensor = torch.from_numpy(values)
    if _pins(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a captured step uploads values of its host, which replays would read from freed memory")
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _pins(device: torch.device) -> bool:
    # kernels are only compiled for meta tensors and absent devices, perhaps in a process that must not initialize CUDA
    return device not in (torch.device("cpu"), torch.device("meta")) and torch.accelerator.is_available()
