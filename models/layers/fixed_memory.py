"""Memory of captured steps at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor


class FixedMemory:
    """Memory of captured steps. One step runs at a time, so that steps of all sizes share it; the largest is captured
    first."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """int32, zeros when it is new. Steps of other sizes differ in the first dimension."""
        part = self._parts.get(name)
        if part is None or len(part) < shape[0]:
            part = self._parts[name] = torch.zeros(shape, dtype=torch.int32, device=device)
        return part[: shape[0]]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())
