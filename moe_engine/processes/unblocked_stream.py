"""Standard streams whose writers never wait for a reader.

The reader of a log may stop: a pager, a collector that hangs, Ctrl-S. A full pipe would then stop the thread that
writes, and with it all requests. Text is written immediately while there is room, so that the last lines of a process
that crashes arrive; the rest waits in a queue, and is dropped and counted beyond its limit.
"""

from __future__ import annotations

import atexit
import os
import select
import stat
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Protocol, TextIO

from moe_engine.processes.watched_thread import start_watched

MAX_BYTES = 16 << 20
"""Max size of what waits for the reader of a stream."""
EXIT_SECONDS = 1.0
"""Max wait for the reader when the process exits."""


class Output(Protocol):
    """What loggers and `print` need of a stream."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class UnblockedStream:
    """
    Args:
        fd: the descriptor. `close`: with this object.
    """

    def __init__(self, fd: int, *, close: bool) -> None:
        self._fd = fd
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        if close:
            weakref.finalize(self, os.close, fd).atexit = False

    def write(self, text: str) -> int:
        """Raises OSError: the stream is closed, its disk is full."""
        rest = memoryview(text.encode(errors="backslashreplace"))
        with self._changed:
            is_first = not self._waiting
            if is_first:
                rest = rest[self._write(rest) :]
            elif self._num_dropped or self._size + len(rest) > MAX_BYTES:  # the count stands where lines are missing
                self._num_dropped += max(1, text.count("\n"))
                return len(text)
            if rest:
                self._waiting.append(rest)
                self._size += len(rest)
                if is_first:
                    with suppress(RuntimeError):  # the interpreter is shutting down
                        start_watched("log reader", self._drain, lambda message: self._clear())
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered that could be written."""

    def wait(self, seconds: float) -> None:
        """Waits until the reader has taken everything, at most this long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _write(self, data: memoryview) -> int:
        """Writes while there is room; the number of bytes written. Writes of this size to a pipe are whole or none."""
        done = 0
        while done < len(data) and self._room.poll(0):
            try:
                done += os.write(self._fd, data[done : done + select.PIPE_BUF])
            except BlockingIOError:
                break
        return done

    def _drain(self) -> None:
        """In a thread, while text waits."""
        while True:
            self._room.poll()
            with self._changed:
                try:
                    done = self._write(self._waiting[0])
                except OSError:  # the reader is gone
                    self._clear()
                    return
                self._size -= done
                self._waiting[0] = self._waiting[0][done:]
                if not self._waiting[0]:
                    self._waiting.popleft()
                if not self._waiting and self._num_dropped:
                    words = f"{self._num_dropped} lines are missing here: the reader of this output did not read them\n"
                    self._waiting.append(memoryview(words.encode()))
                    self._size, self._num_dropped = len(words), 0
                if not self._waiting:
                    self._changed.notify_all()
                    return

    def _clear(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._size = self._num_dropped = 0
            self._changed.notify_all()


_streams: weakref.WeakValueDictionary[tuple[int, int, int], UnblockedStream] = weakref.WeakValueDictionary()
"""One for each stream of this process, so that lines keep their order."""


def unblocked(stream: TextIO) -> Output:
    """The stream for writers that must not wait for its reader. A file, or a stream without a descriptor, as it is."""
    try:
        fd = stream.fileno()
        found = os.fstat(fd)
    except (AttributeError, OSError, ValueError):
        return stream
    if stat.S_ISREG(found.st_mode):
        return stream
    key = fd, found.st_dev, found.st_ino
    if (made := _streams.get(key)) is None:
        own = None if stat.S_ISSOCK(found.st_mode) else _reopened(fd)
        made = _streams[key] = UnblockedStream(fd if own is None else own, close=own is not None)
    return made


def _reopened(fd: int) -> int | None:
    """The pipe or terminal, opened again: O_NONBLOCK then holds for this process alone. None: it cannot be opened."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None


@atexit.register
def _wait_for_readers() -> None:
    for stream in list(_streams.values()):
        stream.wait(EXIT_SECONDS)
