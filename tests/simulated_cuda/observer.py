"""Who watches launches, and whether they compute: for programs that count the work of a step at a model's true sizes.

With an observer, launches over more than `SMALL` bytes compute nothing: results have their shapes, and memory that
nothing wrote, of which the host gives no page away. Smaller ones compute, so that lengths and slots keep their values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

SMALL = 1 << 14


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

    def replayed(self, graph: Any) -> None:
        """A graph was launched."""


observer: Observer | None = None
"""Set once, before the first allocation on a device."""


def skips(tensors: Iterable[Any]) -> bool:
    """Whether a launch over these computes nothing."""
    return observer is not None and sum(x.numel() * x.element_size() for x in tensors) > SMALL
