"""Reads a checkpoint's files into the page cache ahead of the loader: the disk works while weights are converted.

A thread requests the files part by part from the kernel (POSIX_FADV_WILLNEED), at most `WINDOW_BYTES` ahead of the
loader, in the order of layers. There is no effect if the kernel ignores the advice. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from moe_engine.models.tensor_header import TensorHeader
from moe_engine.models.tensors import layer_index

WINDOW_BYTES = 2 << 30
PART_BYTES = 16 << 20
IDLE_SECONDS = 60.0
"""Seconds without a read of the loader after which the thread ends."""


class File(Protocol):
    path: Path
    entries: dict[str, TensorHeader]


class Span(NamedTuple):
    """Adjacent bytes of a file."""

    path: Path
    start: int
    stop: int


def spans(files: Mapping[str, File], names: Collection[str]) -> list[Span]:
    """The bytes of these tensors in the order of layers, adjacent ones joined."""
    found: list[Span] = []
    places = ((layer_index(name), files[name].path, files[name].entries[name]) for name in names)
    for _, path, header in sorted(places, key=lambda place: (place[0], str(place[1]), place[2].start)):
        last = found[-1] if found else None
        if last is not None and last.path == path and last.start <= header.start <= last.stop:
            found[-1] = Span(path, last.start, max(last.stop, header.stop))
        else:
            found.append(Span(path, header.start, header.stop))
    return found


class ReadAhead:
    """Args:
    window: max bytes that are requested and not yet read by the loader.
    """

    def __init__(self, wanted: list[Span], window: int = WINDOW_BYTES) -> None:
        self._wanted, self._window = wanted, window
        self._asked = self._taken = 0
        self._ended = False
        self._changed = threading.Condition()
        self.work: Future[None] | None = None
        """Of the thread."""
        if hasattr(os, "posix_fadvise"):
            pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
            self.work = pool.submit(self._run)
            pool.shutdown(wait=False)

    def take(self, num_bytes: int) -> None:
        """Reports that the loader has read this number of bytes."""
        with self._changed:
            self._taken += num_bytes
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, at the latest after the current part."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the loader reports files that cannot be read
            for span in self._wanted:
                file = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not self._advise(file, span):
                        return
                finally:
                    os.close(file)

    def _may_go_on(self) -> bool:
        return self._ended or self._asked - self._taken < self._window

    def _advise(self, file: int, span: Span) -> bool:
        """Requests a part; False if it was closed meanwhile, or the loader is idle."""
        for start in range(span.start, span.stop, PART_BYTES):
            size = min(PART_BYTES, span.stop - start)
            with self._changed:
                if not self._changed.wait_for(self._may_go_on, IDLE_SECONDS) or self._ended:
                    return False
                self._asked += size
            os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)
        return True
