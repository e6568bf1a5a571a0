"""Loads of KV that were done after their step's result, reported by the worker's threads to the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moe_engine.errors import MoeEngineError


class KVArrivals:
    """
    Args:
        wake: ends the wait of an idle core; called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._reports: deque[tuple[int, BaseException | None]] = deque()

    def report(self, load: int, error: BaseException | None) -> None:
        """A load is done, or failed. Thread-safe."""
        self._reports.append((load, error))
        self._wake()

    def take(self) -> list[int]:
        """The loads reported since the last call.

        Raises:
            MoeEngineError: a load failed, so its request would wait for ever.
        """
        loads = []
        while self._reports:
            load, error = self._reports.popleft()
            if error is not None:
                raise MoeEngineError(f"load {load} of KV failed: {type(error).__name__}: {error}") from error
            loads.append(load)
        return loads
