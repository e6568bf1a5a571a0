"""Threads that read the parts of a large tensor: into its memory directly, or into buffers that are used in order.

The buffers in use at a time are bounded by their number; the consumer copies them one after the other, in the order of
the parts. Threads that load whole weights (`load_threads`) read serially: all cores are busy already.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from moe_engine.models.checkpoint.load_threads import MAX_THREADS, in_load_thread, mark_load_thread

T = TypeVar("T")


class PartReads:
    """
    Args:
        num_threads: 1: all reads run in the caller's thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = min(num_threads, MAX_THREADS)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def all(self, reads: Sequence[Callable[[], None]]) -> None:
        """Runs reads that write to distinct memory, and waits for all of them. Raises the first error, by order."""
        if self._num_threads <= 1 or len(reads) < 2 or in_load_thread():
            for read in reads:
                read()
            return
        pool = self._threads()
        futures = [pool.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        finally:
            _end(futures)

    def in_order(self, reads: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results of reads, in order; while one is used, the next ones are read. Raises the first error."""
        if self._num_threads <= 1 or in_load_thread():
            for read in reads:
                yield read()
            return
        waiting: deque[Future[T]] = deque()
        pool = self._threads()
        try:
            for read in reads:
                waiting.append(pool.submit(read))
                if len(waiting) >= self._num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            _end(waiting)

    def close(self) -> None:
        """Ends the threads after their current reads; a later read starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, "read", mark_load_thread)
            return self._pool


def _end(futures: Iterable[Future[Any]]) -> None:
    """Cancels what has not begun, and waits for the rest: its memory may be freed afterwards."""
    wait([future for future in futures if not future.cancel()])


SERIAL = PartReads(1)
