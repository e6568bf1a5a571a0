"""Multi-threaded loading of many small weights: whole weights on several threads, each with one operator thread.

Splitting every small copy or packing over all cores costs a barrier each time; on a busy machine such barriers take
most of the loading time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

State = TypeVar("State")
MAX_THREADS = 16
_here = threading.local()


def in_load_thread() -> bool:
    """True in a thread of several that load: work in it is not divided further."""
    return getattr(_here, "loads", False)


def mark_load_thread() -> None:
    """The calling thread is one of several that load."""
    _here.loads = True


def for_each(count: int, make_state: Callable[[], State], work: Callable[[int, State], None]) -> None:
    """Calls `work(i, state)` for every i < count, with one state per thread. Raises the first error."""
    threads = torch.get_num_threads()
    share = min(threads, MAX_THREADS, count)
    if share <= 1:
        state = make_state()
        for i in range(count):
            work(i, state)
        return
    counter = iter(range(count))
    with ThreadPoolExecutor(share, thread_name_prefix="load") as pool:
        futures = [pool.submit(_drain, counter, make_state, work) for _ in range(share)]
    torch.set_num_threads(threads)  # the pool's threads have changed the default of new threads
    for future in futures:
        future.result()


def _drain(counter: Iterator[int], make_state: Callable[[], State], work: Callable[[int, State], None]) -> None:
    torch.set_num_threads(1)
    mark_load_thread()
    with torch.no_grad():
        state = make_state()
        for i in counter:
            work(i, state)
