"""Choices counted by the kernel that makes them: a layer in one call needs nobody to be told of each of them.

Legend: E experts.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol, runtime_checkable


class _Cell(ctypes.Structure):
    _fields_ = [("counts", ctypes.c_void_p), ("unclear", ctypes.c_int64)]


class CountCell:
    """Where layers count now; nowhere at first. Layers read it anew in every run, so what it says holds for all."""

    __slots__ = ("_cell", "address")

    def __init__(self) -> None:
        self._cell = _Cell()
        self.address = ctypes.addressof(self._cell)
        """Of the two fields, for kernels."""

    def point(self, counts: int, num_bytes: int) -> None:
        """To int32 numbers in the memory of the host, which their owner keeps. The first layer that counts clears them;
        until then they are what they were."""
        self._cell.counts, self._cell.unclear = counts, num_bytes

    def hide(self) -> bool:
        """Counts nothing any more. Returns whether there were numbers that some layer had cleared."""
        cell = self._cell
        cleared = cell.counts is not None and not cell.unclear
        cell.counts = None
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
