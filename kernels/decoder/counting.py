"""Expert choices counted by the kernel that makes them: a layer in one call needs no host recording per layer.

Legend: E experts.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple


class CountCell:
    """Address of the current counts; null at first. Layers read it in every run, so a change applies to all layers."""

    __slots__ = ("_fields", "address")

    def __init__(self) -> None:
        memory = (ctypes.c_int64 * 2)()  # address of the counts, or 0, and number of bytes to zero
        self._fields = memoryview(memory).cast("B").cast("q")  # a write takes a third of a ctypes field's
        self.address = ctypes.addressof(memory)
        """Address of the two fields, for kernels."""

    def point(self, counts: int, num_bytes: int) -> None:
        """Points to int32 counts in host memory, owned by the caller. The first layer that counts zeroes them; until
        then they keep their old values."""
        fields = self._fields
        fields[1] = num_bytes
        fields[0] = counts

    def hide(self) -> bool:
        """Stops counting. Returns whether a layer had zeroed (started) the counts."""
        fields = self._fields
        cleared = fields[0] != 0 and not fields[1]
        fields[0] = 0
        return cleared


class CountPlace(NamedTuple):
    """Position of one layer's counts: expert e at index `first` + e from the cell's address."""

    cell: CountCell
    first: int
