"""Host-to-device copies without host synchronization."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """A pinned host tensor, copied asynchronously: a copy from pageable memory waits for all queued device work."""
    tensor = torch.from_numpy(values)
    # kernels are only compiled for meta tensors and absent devices, perhaps in a process that must not initialize CUDA
    pins = device not in (torch.device("cpu"), torch.device("meta")) and torch.accelerator.is_available()
    return tensor.pin_memory() if pins else tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; no host synchronization."""
    return pinned(values, device).to(device, non_blocking=True)
