"""The worker side of the KV connector (`scheduler.kv_cache.kv_connector`): copies between the KV pool and host memory.

A place is a row of the host pool: the KV of one token in all layers of this rank, MTP layers included. States of
requests have entries of their own (`host_states`), and so have the pages of windowed layers with slots of their own.
On the CPU a copy is done in the step. On an accelerator a thread with its own stream copies, in plan order. Slots that
are stored are first read on the steps' stream, so the step may overwrite them; the step waits only if a plan stores
more than `COPY_BYTES`, or if a load that it needs has arrived on the leader but not on this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from moe_engine.types import KVLoad, KVOps
from moe_engine.worker.device_stream import DeviceStream, make_copy_stream
from moe_engine.worker.kv_cache.host_pool import HostPool
from moe_engine.worker.kv_cache.host_states import HostStates
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.kv_cache.storage_io import StorageIO

logger = logging.getLogger(__name__)

COPY_BYTES = 32 << 20
"""Max bytes that one copy holds in addition to the pool."""
STORE = 0
"""Number for a listener: a copy to the host. Loads are numbered from 1."""

Listener = Callable[[int, BaseException | None], None]
"""Called with a load and the error that ended it, or with `STORE` and an error, from any thread."""


class KVCopies:
    """The host pool of one rank and its copies.

    Args:
        num_places: tokens of the host pool.
        layout: of the host pool (`host_pool.LAYOUTS`).
        staged: on an accelerator a copy is one transfer between the device and a staging buffer, whose rows the CPU
            scatters and gathers (`--hicache-io-backend kernel`); else a transfer for each run of neighboring places.
        states: host memory for the states of prefixes, if the model has states.
        num_window_slots: tokens of the host's pool of windowed layers; 0: they have no slots of their own.
    """

    def __init__(
        self,
        pool: KVPool,
        num_places: int,
        stream: DeviceStream,
        *,
        layout: str = "page_first",
        staged: bool = False,
        states: HostStates | None = None,
        num_window_slots: int = 0,
    ) -> None:
        self._pool = pool
        self._stream, self._num_places = stream, num_places
        self.host = HostPool(num_places, pool.row_widths, layout, stream)
        self._windows = HostPool(num_window_slots, pool.window_widths, layout, stream) if num_window_slots else None
        self._copies = make_copy_stream(stream)
        self._staging: Tensor | None = None
        if staged and self._copies is not None:
            self._staging = stream.host_bytes(_at_once(self.host), self.host.width)
        self.storage: StorageIO | None = None
        """Set if the tier has storage below it."""
        self._states = states
        self._storing: Future[None] | None = None
        self._storing_states: Future[None] | None = None
        self._loading: dict[int, Future[None]] = {}
        self._done: list[int] = []
        self.listener: Listener | None = None

    @property
    def num_bytes(self) -> int:
        further = (self._states, self._windows)
        return self.host.num_bytes + sum(part.num_bytes for part in further if part is not None)

    def start(self, ops: KVOps) -> None:
        """Runs, or begins to run, the copies of a plan, before its forward; on the thread of the steps."""
        for number in ops.arrived:
            arrived = self._loading.pop(number, None)
            if arrived is not None:
                arrived.result()
        self._store(self.host, ops.store_slots, ops.store_places)
        if ops.state_stores:
            self._store_states(ops.state_stores)
        if ops.window_stores:
            assert self._windows is not None
            slots = self._slots_of([page for page, _ in ops.window_stores])
            self._store(self._windows, slots, self._places_of([entry for _, entry in ops.window_stores]))
        for load in ops.loads:
            if self._copies is None:
                self._load(load)
                self._done.append(load.id)
                continue
            copy = self._loading[load.id] = self._copies.run(self._load, load)
            copy.add_done_callback(partial(self._report, load.id))
        if self.storage is not None and (ops.fetches or ops.backups or ops.stops):
            self.storage.start(ops, self._in_progress())

    def take_done(self) -> tuple[int, ...]:
        """Loads that were completed in their step."""
        done, self._done = tuple(self._done), []
        return done

    def end_all(self) -> None:
        """After a failed step: waits for all copies. The scheduler drops the copies of the step."""
        self._done = []
        for copy in self._in_progress():
            if (error := copy.exception()) is not None:
                logger.error("A copy of KV failed: %s", error)
        self._storing = self._storing_states = None
        self._loading = {}

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        if self.storage is not None:
            self.storage.close()

    def _in_progress(self) -> list[Future[None]]:
        """The last stores, and all loads."""
        return [copy for copy in (self._storing, self._storing_states, *self._loading.values()) if copy is not None]

    def _store_states(self, pairs: list[tuple[int, int]]) -> None:
        assert self._states is not None
        at_once = max(1, COPY_BYTES // self._states.each_bytes)
        for begin in range(0, len(pairs), at_once):
            if self._storing_states is not None:
                self._storing_states.result()  # its states are still in memory
            part = pairs[begin : begin + at_once]
            rows, entries = [self._states.pool.read_snapshot(s) for s, _ in part], [entry for _, entry in part]
            if self._copies is None:
                self._states.download(rows, entries)
            else:
                self._storing_states = self._copies.run(self._states.download, rows, entries)
                self._storing_states.add_done_callback(self._stored)

    def _slots_of(self, pages: list[int]) -> list[int]:
        """The window slots of pages, which are named by their first slot."""
        return [slot for page in pages for slot in range(page, page + self._pool.page_size)]

    def _places_of(self, entries: list[int]) -> list[int]:
        """The places of entries in the host's pool of windowed layers."""
        size = self._pool.page_size
        return [place for entry in entries for place in range(entry * size, (entry + 1) * size)]

    def _store(self, host: HostPool, slots: list[int], places: list[int]) -> None:
        """Copies slots of the KV pool to places of a host pool."""
        read = self._pool.read_rows if host is self.host else self._pool.read_windows
        for part in _parts(host, len(slots)):
            if self._storing is not None:
                self._storing.result()  # its rows are still in memory
            rows = read(self._stream.from_list(slots[part], torch.int64))
            if self._copies is None:
                host.put(torch.tensor(places[part]), rows)
            else:
                self._storing = self._copies.run(self._download, host, rows, places[part])
                self._storing.add_done_callback(self._stored)

    def _download(self, host: HostPool, rows: Tensor, places: list[int]) -> None:
        if self._staging is None or host is not self.host:
            host.download(rows, places)
            return
        staged = self._staging[: len(places)]
        staged.copy_(rows, non_blocking=True)
        self._stream.wait_for_copies()
        self.host.put(torch.tensor(places), staged)

    def _load(self, load: KVLoad) -> None:
        self._load_rows(self.host, load.places, load.slots)
        if load.states:
            assert self._states is not None
            self._states.upload(load.states)
        if load.windows:
            assert self._windows is not None
            places = self._places_of([entry for entry, _ in load.windows])
            self._load_rows(self._windows, places, self._slots_of([page for _, page in load.windows]))

    def _load_rows(self, host: HostPool, places: list[int], slots: list[int]) -> None:
        """The inverse of `_store`."""
        write = self._pool.write_rows if host is self.host else self._pool.write_windows
        for part in _parts(host, len(slots)):
            own = self._stream.from_list(slots[part], torch.int64)
            if self._copies is None:
                rows = host.take(torch.tensor(places[part]))
            else:
                rows = torch.empty(len(places[part]), host.width, dtype=torch.uint8, device=self._stream.device)
                self._upload(host, places[part], rows)
            write(own, rows)

    def _upload(self, host: HostPool, places: list[int], rows: Tensor) -> None:
        if self._staging is None or host is not self.host:
            host.upload(places, rows)
            return
        self._stream.wait_for_copies()  # copies of the rows staged earlier
        staged = self._staging[: len(places)]
        staged.copy_(self.host.take(torch.tensor(places)))
        rows.copy_(staged, non_blocking=True)

    def _report(self, number: int, done: Future[None]) -> None:
        if self.listener is not None:
            self.listener(number, done.exception())

    def _stored(self, done: Future[None]) -> None:
        """Handles the end of a store, whose places count as valid for the scheduler once its step has run."""
        if (error := done.exception()) is not None and self.listener is not None:
            self.listener(STORE, error)


def _at_once(host: HostPool) -> int:
    """Rows of one copy."""
    return max(1, COPY_BYTES // host.width)


def _parts(host: HostPool, count: int) -> Iterator[slice]:
    """The copies of `count` rows."""
    for begin in range(0, count, _at_once(host)):
        yield slice(begin, begin + _at_once(host))
