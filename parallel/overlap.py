"""Communication beside computation: a lane runs calls in order while its owner goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T", covariant=True)


class Pending(Protocol[T]):
    """A call under way."""

    def wait(self) -> T:
        """Its result, when the owner may use it; raises what the call raised."""


class Lane(Protocol):
    """Runs calls one after the other. All ranks of a group give theirs the same calls in the same order."""

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]: ...


@dataclass(frozen=True)
class Overlap:
    """What goes on beside dispatch and combine, in `lane`.

    Attributes:
        two_batches: a step is cut into halves; one computes while the other's tokens travel.
        threshold: see `worker.two_batches.find_cut`.
        shared_expert: it is computed while tokens travel to the routed ones.
    """

    lane: Lane
    two_batches: bool = False
    threshold: float = 0.48
    shared_expert: bool = False


class ThreadLane:
    """A thread of its own: collectives wait without the interpreter lock, so the owner computes meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "overlap")

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]:
        return _Future(self._thread.submit(_infer, call, *args))


class InLine:
    """No lane: the owner does it."""

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]:
        return Done(call(*args))


@dataclass(frozen=True)
class Done:
    """Implements `Pending`."""

    result: Any

    def wait(self) -> Any:
        return self.result


class _Future:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> Any:
        return self._future.result()


def _infer(call: Callable[..., Any], *args: Any) -> Any:
    with torch.inference_mode():  # the mode belongs to a thread
        return call(*args)
