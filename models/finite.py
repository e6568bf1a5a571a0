"""Whether a tensor holds numbers alone."""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_NUMBERS = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e5m2: (0x7F, 0x7C), torch.float8_e8m0fnu: (0xFF, 0xFF)}
"""By dtype of a byte: the bits of a magnitude, and the least one that is NaN or infinite."""


def is_finite(values: Tensor) -> bool:
    """False if a value is NaN or infinite. Reads the memory once and allocates none for types of two bytes and more."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.element_size() > 1:
        return all(bool(torch.isfinite(end)) for end in torch.aminmax(values))
    known = _NOT_NUMBERS.get(values.dtype)
    return known is None or bool((values.view(torch.uint8) & known[0]).max() < known[1])
