"""The worker side of the storage tier: reads and writes of pages on threads of their own, while steps run.

A rank reads its own share of each page. Every operation is reported with the number of its leading pages: the scheduler
uses the minimum over all ranks. A rank without a share of its own (MLA's latent is the same on all ranks of a group)
reads the pages that the first rank has written, and writes none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import attrgetter
from typing import Any

from moe_engine.storage.sealed_pages import SealedPages
from moe_engine.types import KVBackup, KVFetch, KVOps, KVReport
from moe_engine.types.kv_ops import NO_STATE
from moe_engine.worker.kv_cache.host_pool import HostPool
from moe_engine.worker.kv_cache.host_states import HostStates
from moe_engine.worker.kv_cache.io_threads import IOThreads

logger = logging.getLogger("moe_engine")

READERS = 4
PAGES_AT_ONCE = 4
"""Pages of one read or write."""

Reporter = Callable[[KVReport], None]


class _Fetch:
    """Progress of a fetch whose parts run on several threads: pages up to the first missing one."""

    def __init__(self, op: KVFetch) -> None:
        self.op = op
        self.lock = threading.Lock()
        self.end = len(op.keys)
        """Pages from here on are not read."""
        self.done: set[int] = set()
        """Beginnings of the parts that are already read."""
        self.num_open = 0

    def pages(self) -> int:
        """Number of leading pages that are read."""
        pages = 0
        while pages in self.done:
            pages += PAGES_AT_ONCE
        return min(pages, self.end)


class StorageIO:
    """
    Args:
        writes: whether this rank stores its share.
        states: host memory of states and where they are stored, if the model has states. Every rank stores its own.
    """

    def __init__(
        self, host: HostPool, pages: SealedPages, page_size: int, *, writes: bool,
        states: tuple[HostStates, SealedPages] | None = None,
    ) -> None:  # fmt: skip
        self.pages = pages
        self._states = states
        self._host = host
        self._page_size = page_size
        self._writes = writes
        self._readers = IOThreads(READERS, "kv-storage-read")
        self._writer = IOThreads(1, "kv-storage-write")
        self._last = 0
        """The last operation begun: operations are numbered in the order of their plans."""
        self._stopped: set[int] = set()
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._num_clearing = 0
        self._reporter: Reporter | None = None

    def report_to(self, reporter: Reporter) -> None:
        """Sends reports to the scheduler of `reporter`, whose operations are numbered from 1."""
        self._reporter, self._last = reporter, 0

    @property
    def num_open(self) -> int:
        """Operations without their last report."""
        return len(self._open)

    def start(self, ops: KVOps, before: Sequence[Future[None]]) -> None:
        """Begins the operations of a plan after the copies `before`, which write or read the same places."""
        for number in ops.stops:
            with self._lock:
                if number in self._open:
                    self._stopped.add(number)
                    continue
            if number > self._last:
                self._last = number
                self._report(number, 0, True)  # belongs to a step that failed before it began
        begun: list[KVFetch | KVBackup] = [*ops.fetches, *ops.backups]
        for op in sorted(begun, key=attrgetter("id")):
            if not self._begin(op.id):
                continue
            if isinstance(op, KVFetch):
                self._readers.submit(self._guard, partial(self._fetch, op), op.id, before)
            elif self._writes or op.state != NO_STATE:
                self._writer.submit(self._guard, partial(self._backup, op), op.id, before)
            else:
                self._report(op.id, len(op.keys), True)  # another rank stores these pages

    def clear(self) -> None:
        """Begins to remove all pages, after the writes submitted so far; `facts` shows the end."""
        self._num_clearing += 1
        self._writer.submit(self._clear)

    def _clear(self) -> None:
        try:
            self.pages.clear()
        finally:
            self._num_clearing -= 1

    def facts(self) -> dict[str, Any]:
        """Plain values: of the backend, errors since the start, operations in progress."""
        found = self.pages.facts()
        return found | {"num_open": self.num_open, "is_clearing": self._num_clearing > 0}

    def close(self) -> None:
        """Stops without waiting for reads or writes that hang; later operations do not run."""
        self._closed = True
        self._readers.close()
        self._writer.close()

    def _begin(self, number: int) -> bool:
        if number <= self._last:
            return False  # repeated after a failed step
        self._last = number
        with self._lock:
            self._open.add(number)
        return True

    def _guard(self, run: Callable[[], None], number: int, before: Sequence[Future[None]]) -> None:
        try:
            wait(before)
            if any(copy.exception() is not None for copy in before):
                self._report(number, 0, True)  # its places have no valid data
                return
            run()
        except Exception as error:
            logger.error("KV storage: operation %d: %s: %s", number, type(error).__name__, error)
            self._report(number, 0, True)

    def _fetch(self, op: KVFetch) -> None:
        if op.id in self._stopped:  # while this fetch was queued after hanging reads
            self._report(op.id, 0, True)
            return
        if not op.pages:
            count = self.pages.exists(op.keys)
            self._report(op.id, count if op.state == NO_STATE else self._last_state(op.keys[:count]), True)
            return
        if op.state != NO_STATE and not self._read_state(op.keys[-1], op.state):
            self._report(op.id, 0, True)
            return
        state = _Fetch(op)
        state.num_open = -(-len(op.keys) // PAGES_AT_ONCE)
        for begin in range(PAGES_AT_ONCE, len(op.keys), PAGES_AT_ONCE):
            self._readers.submit(self._read_part, state, begin)
        self._read_part(state, 0)

    def _last_state(self, keys: Sequence[bytes]) -> int:
        """Number of leading pages up to the last one with a state."""
        assert self._states is not None
        stored = self._states[1]
        return next((count for count in range(len(keys), 0, -1) if stored.exists([keys[count - 1]])), 0)

    def _read_state(self, key: bytes, entry: int) -> bool:
        assert self._states is not None
        host, stored = self._states
        return stored.get([key], [host.page(entry)]) == 1

    def _read_part(self, state: _Fetch, begin: int) -> None:
        op, read = state.op, 0
        keys = op.keys[begin : begin + PAGES_AT_ONCE]
        try:
            if begin < state.end and op.id not in self._stopped and not self._closed:
                read = self._read(keys, op.pages[begin : begin + PAGES_AT_ONCE])
        except Exception as error:
            logger.error("KV storage: fetch %d: %s: %s", op.id, type(error).__name__, error)
        with state.lock:
            state.done.add(begin)
            if read < len(keys):
                state.end = min(state.end, begin + read)
            state.num_open -= 1
            self._report(op.id, state.pages(), state.num_open == 0)  # in order: the last report ends the operation

    def _read(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        size = self._page_size
        targets = [self._host.page_target(page * size, size) for page in pages]
        read = self.pages.get(keys, targets)
        for page, target in zip(pages[:read], targets):
            self._host.write_page(page * size, size, target)
        return read

    def _backup(self, op: KVBackup) -> None:
        size, stored = self._page_size, 0
        if op.state != NO_STATE:
            assert self._states is not None
            host, states = self._states
            stopped = op.id in self._stopped or self._closed
            self._report(op.id, 0 if stopped else states.put(op.keys, [host.page(op.state)]), True)
            return
        for begin in range(0, len(op.keys), PAGES_AT_ONCE):
            if op.id in self._stopped or self._closed:
                break
            part = slice(begin, begin + PAGES_AT_ONCE)
            stored += self.pages.put(op.keys[part], [self._host.read_page(p * size, size) for p in op.pages[part]])
        self._report(op.id, stored, True)

    def _report(self, number: int, pages: int, ended: bool) -> None:
        if self._reporter is not None:
            self._reporter(KVReport(number, pages, ended))
        if ended:
            with self._lock:
                self._open.discard(number)
                self._stopped.discard(number)
