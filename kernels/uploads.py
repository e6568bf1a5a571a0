"""Host-to-device copies without host synchronisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """A pinned host tensor, copied asynchronously: a copy from pageable memory waits for all queued device work."""
    tensor = torch.from_numpy(values)
    # "meta", or a device that is absent: kernels are only compiled, perhaps in a process that must not initialize CUDA
    pins = device.type not in ("cpu", "meta") and torch.accelerator.is_available()
    return tensor.pin_memory() if pins else tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; no host synchronisation."""
    return pinned(values, device).to(device, non_blocking=True)
