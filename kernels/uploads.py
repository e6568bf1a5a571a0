"""Host values on their way to a device, without the host waiting for what runs there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """A host tensor whose copy to the device waits for nothing: other memory is copied behind all that runs there."""
    tensor = torch.from_numpy(values)
    pins = device != torch.device("cpu") and torch.accelerator.is_available()  # else the device is one to compile for
    return tensor.pin_memory() if pins else tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Values on the device; the host waits for nothing."""
    return pinned(values, device).to(device, non_blocking=True)
