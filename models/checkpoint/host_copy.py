"""Copies from buffers of files to weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ONE_THREAD_ELEMENTS = 1 << 22


def copy_into(out: Tensor, part: Tensor) -> None:
    """out = part; same-dtype copies of moderate size use one thread, since waking others costs more than it saves."""
    plain = out.dtype == part.dtype and out.device == part.device and out.is_contiguous() and part.is_contiguous()
    if plain and 0 < part.numel() <= _ONE_THREAD_ELEMENTS:
        np.copyto(out.view(-1).view(torch.uint8).numpy(), part.view(-1).view(torch.uint8).numpy())
    else:
        out.copy_(part)
