"""Who watches launches, and whether they compute: for programs that count the work of a step at a model's true sizes.

With an observer, launches compute nothing where they are large (`skips`): results have their shapes, and zeros that
take no memory. Small ones and those over integers compute, so that lengths and slots keep values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

SMALL, SMALL_INTEGERS = 1 << 14, 1 << 25
"""Bytes of the tensors of a launch."""


class Observer(Protocol):
    """Sees every launch after its results are known."""

    def operator(self, launch: Any, op: Any, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> None:
        """An operator of torch: the tensors it is given, those of them it writes, those it makes."""

    def copy(self, launch: Any, num_bytes: int, upload: bool) -> None:
        """A copy between host and device."""

    def kernel(self, launch: Any, name: str, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """A kernel of Triton's, by the names of its parameters."""

    def collective(self, launch: Any, name: str, out: list[Tensor], given: list[Tensor], group: Any) -> None:
        """An operation of a process group."""

    def waited(self, wait: Any) -> None:
        """The host waited for a device."""

    def replayed(self, graph: Any) -> None:
        """A graph was launched."""


observer: Observer | None = None
"""Set once, before the first allocation on a device."""


def skips(tensors: Iterable[Any]) -> bool:
    """Whether a launch over these computes nothing."""
    if observer is None:
        return False
    given = list(tensors)
    most = SMALL if any(x.is_floating_point() for x in given) else SMALL_INTEGERS
    return sum(x.numel() * x.element_size() for x in given) > most
