"""Reads a checkpoint's files into the page cache ahead of the loader: the disk works while weights are converted.

Threads read the files part by part in the order of layers, at most a window ahead of the loader. With
``--weight-loader-prefetch-checkpoints`` there are several, and the ranks of a host, which share its page cache, read
different parts. Advice to the kernel (POSIX_FADV_WILLNEED) takes no part of the processor, but Linux follows it only
for the first 128 KiB of a range, and network file systems may ignore it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from moe_engine.models.checkpoint.tensor_header import TensorHeader
from moe_engine.models.tensors.model import layer_index

WINDOW_BYTES = 2 << 30
PART_BYTES = 16 << 20
ROOM_BYTES = 1 << 20
"""Bytes of a read: a core's cache holds them."""
IDLE_SECONDS = 60.0
"""Seconds without a read of the loader after which the threads end."""
_HEAD = "lm_head."
_LAST = 1 << 30


@dataclass(frozen=True)
class Prefetch:
    """Settings of threads that read parts. `rank` of `num_ranks`: among the ranks of a host that load the same files;
    each reads every `num_ranks`-th part."""

    num_threads: int = 1
    rank: int = 0
    num_ranks: int = 1


class File(Protocol):
    path: Path
    entries: dict[str, TensorHeader]


class Span(NamedTuple):
    """Adjacent bytes of a file."""

    path: Path
    start: int
    stop: int


def spans(files: Mapping[str, File], names: Collection[str]) -> list[Span]:
    """The bytes of these tensors in the order of layers, the head last, adjacent ones joined."""
    found: list[Span] = []
    places = ((_order(name), files[name].path, files[name].entries[name]) for name in names)
    for _, path, header in sorted(places, key=lambda place: (place[0], str(place[1]), place[2].start)):
        last = found[-1] if found else None
        if last is not None and last.path == path and last.start <= header.start <= last.stop:
            found[-1] = Span(path, last.start, max(last.stop, header.stop))
        else:
            found.append(Span(path, header.start, header.stop))
    return found


def _order(name: str) -> int:
    """The head would otherwise fill the window during the whole load."""
    return _LAST if name.startswith(_HEAD) else layer_index(name)


class ReadAhead:
    """
    Args:
        window: max bytes that the threads are ahead of the loader.

    Attributes:
        work: of each thread.
    """

    def __init__(self, wanted: Sequence[Span], prefetch: Prefetch, window: int = WINDOW_BYTES) -> None:
        self._window, self._prefetch = window, prefetch
        self._asked = self._taken = 0
        self._ended = False
        self._changed = threading.Condition()
        self._parts = _parts(wanted)
        self._number = 0
        self.work: list[Future[None]] = []
        if not hasattr(os, "preadv"):
            return
        pool = ThreadPoolExecutor(prefetch.num_threads, thread_name_prefix="read-ahead")
        self.work += [pool.submit(self._run) for _ in range(prefetch.num_threads)]
        pool.shutdown(wait=False)

    def take(self, num_bytes: int) -> None:
        """Reports that the loader has read this number of bytes, or has passed over them."""
        with self._changed:
            self._taken += num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads, at the latest after their current parts."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        path, file = None, -1
        room = memoryview(bytearray(ROOM_BYTES))
        try:
            while (part := self._next()) is not None:
                with contextlib.suppress(OSError):  # the loader reports files that cannot be read
                    if part.path != path:
                        if path is not None:
                            path = None
                            os.close(file)
                        file = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
                        path = part.path
                    _read(file, part, room)
        finally:
            if path is not None:
                os.close(file)

    def _may_go_on(self) -> bool:
        return self._ended or self._asked - self._taken < self._window

    def _next(self) -> Span | None:
        """The next part of this rank; None: after the last one, if it was closed meanwhile, or the loader is idle."""
        own = self._prefetch
        with self._changed:
            while True:
                if not self._changed.wait_for(self._may_go_on, IDLE_SECONDS) or self._ended:
                    return None
                part = next(self._parts, None)
                if part is None:
                    return None
                self._asked += part.stop - part.start
                self._number += 1
                if (self._number - 1) % own.num_ranks == own.rank:
                    return part


def _parts(wanted: Sequence[Span]) -> Iterator[Span]:
    for span in wanted:
        for start in range(span.start, span.stop, PART_BYTES):
            yield Span(span.path, start, min(start + PART_BYTES, span.stop))


def _read(file: int, part: Span, room: memoryview) -> None:
    """Reads a part, for its effect on the page cache."""
    start = part.start
    while start < part.stop:
        count = os.preadv(file, [room[: part.stop - start]], start)
        if not count:  # truncated, which the loader reports
            return
        start += count


def drop_cache(paths: Collection[Path]) -> None:
    """Removes files from the page cache (``--weight-loader-drop-cache-after-load``), as far as the kernel follows."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
