"""Choices counted by the kernel that makes them: a layer in one call needs nobody to be told of each of them.

Legend: E experts.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol, runtime_checkable


class CountCell:
    """Where layers count now; nowhere at first. Layers read it anew in every run, so what it says holds for all."""

    __slots__ = ("_fields", "address")

    def __init__(self) -> None:
        memory = (ctypes.c_int64 * 2)()  # where the numbers are, or 0, and how many bytes of them are unclear
        self._fields = memoryview(memory).cast("B").cast("q")  # a write takes a third of a ctypes field's
        self.address = ctypes.addressof(memory)
        """Of the two fields, for kernels."""

    def point(self, counts: int, num_bytes: int) -> None:
        """To int32 numbers in the memory of the host, which their owner keeps. The first layer that counts clears them;
        until then they are what they were."""
        fields = self._fields
        fields[1] = num_bytes
        fields[0] = counts

    def hide(self) -> bool:
        """Counts nothing any more. Returns whether there were numbers that some layer had cleared."""
        fields = self._fields
        cleared = fields[0] != 0 and not fields[1]
        fields[0] = 0
        return cleared


class CountPlace(NamedTuple):
    """Where one layer counts: the number of expert e is `first` + e behind where the cell points."""

    cell: CountCell
    first: int


@runtime_checkable
class CountsChoices(Protocol):
    """A `FusedMoE` that can count what its layers' routers choose."""

    def count_choices(self, layer: Any, place: CountPlace | None) -> None:
        """`layer`, which `fuse` gave, adds 1 for every choice of an expert from now on, alone or as a part of more,
        None: no longer. Whoever calls keeps the cell."""
