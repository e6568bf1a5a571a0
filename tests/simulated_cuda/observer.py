"""The observer of launches, for programs that count the work of a step at a model's true sizes.

With an observer, large launches compute nothing (`skips`): results have their shapes, and zeros that take no memory.
Small launches and launches over integers compute, so that lengths and slots have values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

SMALL, SMALL_INTEGERS = 1 << 14, 1 << 25
"""Limit of the bytes of a launch's tensors."""


class Observer(Protocol):
    """Called for every launch after its results are known."""

    def operator(self, launch: Any, op: Any, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> None:
        """A torch operator: its input tensors, those that it writes, and those that it creates."""

    def copy(self, launch: Any, num_bytes: int, upload: bool) -> None:
        """A copy between host and device."""

    def kernel(self, launch: Any, name: str, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """A Triton kernel, with arguments by parameter name."""

    def collective(self, launch: Any, name: str, out: list[Tensor], given: list[Tensor], group: Any) -> None:
        """An operation of a process group."""

    def waited(self, wait: Any) -> None:
        """The host waited for a device."""

    def replayed(self, graph: Any) -> None:
        """A graph was launched."""


observer: Observer | None = None
"""Set once, before the first allocation on a device."""


def skips(tensors: Iterable[Any]) -> bool:
    """True if a launch over these tensors computes nothing."""
    if observer is None:
        return False
    given = list(tensors)
    most = SMALL if any(x.is_floating_point() for x in given) else SMALL_INTEGERS
    return sum(x.numel() * x.element_size() for x in given) > most
