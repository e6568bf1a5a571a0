"""Choices counted by the kernel that makes them: a layer in one call needs nobody to be told of each of them.

Legend: E experts.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol, runtime_checkable


class CountCell:
    """Where layers count now; nowhere at first. Layers read it anew in every run, so what it says holds for all."""

    __slots__ = ("_pointer", "address")

    def __init__(self) -> None:
        self._pointer = ctypes.c_void_p(None)
        self.address = ctypes.addressof(self._pointer)
        """Of the pointer, for kernels."""

    def point(self, counts: int | None) -> None:
        """To int32 numbers in the memory of the host, which their owner keeps; None counts nothing."""
        self._pointer.value = counts


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
