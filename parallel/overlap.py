"""Overlap of communication and computation: a comm stream runs calls in order while its owner continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T", covariant=True)
R = TypeVar("R")


class Pending(Protocol[T]):
    """A pending call."""

    def wait(self) -> T:
        """Waits for the result; re-raises the call's exception."""


class CommStream(Protocol):
    """Runs calls in order. All ranks of a group submit the same calls in the same order."""

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]: ...


@dataclass(frozen=True)
class Overlap:
    """Overlap of dispatch and combine, which run in `comm_stream`.

    Attributes:
        two_batches: two-batch overlap (TBO): a step is split in halves; one computes while the other communicates.
        threshold: see `worker.batch.two_batches.find_cut`.
        shared_expert: the shared expert is computed during dispatch.
    """

    comm_stream: CommStream
    two_batches: bool = False
    threshold: float = 0.48
    shared_expert: bool = False


class CommThread:
    """A separate thread: collectives wait without the GIL, so the owner computes meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "overlap")

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]:
        return _Future(self._thread.submit(_infer, call, *args))


class InlineStream:
    """No overlap: runs in the owner's thread."""

    def run(self, call: Callable[..., Any], *args: Any) -> Pending[Any]:
        return Done(call(*args))


@dataclass(frozen=True)
class Started(Generic[R]):
    """Implements `Pending`: a call of a comm stream that returns the second half of its work, which runs in the stream
    or thread that waits for it. For one `wait`."""

    first: Pending[Callable[[], R]]

    def wait(self) -> R:
        return self.first.wait()()


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
    with torch.inference_mode():  # inference mode is per thread
        return call(*args)
