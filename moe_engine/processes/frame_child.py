"""Child processes that answer frames on their pipes (`pipe_frames`)."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import IO, Generic, TypeVar

import psutil

from moe_engine.errors import GenerationError, InputError
from moe_engine.processes.child import ended_at_start
from moe_engine.processes.pipe_frames import LENGTH_BYTES, frame
from moe_engine.processes.stopped import HELD_SECONDS, LOOK_SECONDS, StoppedProcessDetector

logger = logging.getLogger("moe_engine")

EXIT_SECONDS = 1.0
STARVED_SECONDS = 120.0
"""Longest wait for a process that gets less processor time than its time limit: others use the processors."""


class _Limit:
    """Time limit of an answer. Only time in which the process computes makes it late, up to `STARVED_SECONDS`."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._began, self._computed = time.monotonic(), self._processor_seconds()

    def left(self) -> float:
        """Least number of seconds until it is over; 0.0: it is over."""
        waited = time.monotonic() - self._began
        if waited < self._seconds:
            return self._seconds - waited
        missing = self._seconds - (self._processor_seconds() - self._computed)
        return max(0.0, min(missing, STARVED_SECONDS - waited))

    def is_starved(self) -> bool:
        """Whether the process has computed less than the limit."""
        return self._processor_seconds() - self._computed < self._seconds

    def _processor_seconds(self) -> float:
        try:
            times = psutil.Process(self._pid).cpu_times()
        except (psutil.Error, OSError):  # it has ended, as its pipes show, or no file can be opened
            return 0.0
        return times.user + times.system


class FrameChild:
    """A child process in a process group of its own, which Ctrl-C does not reach, in use by one thread at a time.

    Args:
        module: run with `python -m`; reads a frame from stdin and writes its answer to stdout, in turn.
        name: for errors that clients see.
    """

    def __init__(self, module: str, name: str = "a child process") -> None:
        self.name = name
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        os.set_blocking(self._popen.stdin.fileno(), False)  # a stopped process reads nothing
        self._module = module
        self.is_starved = False
        """Whether the last answer was late because others used the processors."""

    def begin(self) -> None:
        """Waits until the process can answer. It is killed if this raises. EOFError: it has ended; a second one is
        started."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def ended_at_start(self) -> InputError | GenerationError:
        """The error for clients of a process whose `begin` has raised EOFError."""
        with suppress(subprocess.TimeoutExpired):  # its pipes are closed before it has ended
            self._popen.wait(EXIT_SECONDS)
        self.kill()
        return ended_at_start(self.name, self._popen.returncode)

    def exchange(self, data: bytes, seconds: float) -> bytes | None:
        """The answer to a frame; None if it is late (`_Limit`). Raises EOFError: the process has ended, or a signal has
        stopped it for `HELD_SECONDS` and it is killed."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        limit = _Limit(self.pid, seconds)
        unsent, answer, length = memoryview(frame(data)), bytearray(), LENGTH_BYTES
        while unsent:
            if not self._is_ready(self._popen.stdin, select.POLLOUT, limit):
                return None
            try:
                unsent = unsent[os.write(self._popen.stdin.fileno(), unsent) :]
            except OSError:
                raise EOFError from None
        while len(answer) < length:
            if not self._is_ready(self._popen.stdout, select.POLLIN, limit):
                return None
            part = os.read(self._popen.stdout.fileno(), length - len(answer))
            if not part:
                raise EOFError
            answer += part
            if len(answer) == LENGTH_BYTES:
                length += int.from_bytes(answer, "little")
        return bytes(memoryview(answer)[LENGTH_BYTES:])

    def _is_ready(self, pipe: IO[bytes], event: int, limit: _Limit) -> bool:
        """Whether the process reads or writes its pipe in time; blocking. Raises EOFError as `exchange`."""
        stopped = StoppedProcessDetector(self.pid)
        poller = select.poll()  # `select` refuses the descriptors of a process with a thousand connections
        poller.register(pipe, event)
        while (left := limit.left()) > 0:
            if poller.poll(min(left, LOOK_SECONDS) * 1000):
                return True
            if (held := stopped.seconds()) > HELD_SECONDS:
                logger.error("%s (pid %d) is killed: a signal had stopped it for %.1f s", self._module, self.pid, held)
                self.kill()
                raise EOFError
        self.is_starved = limit.is_starved()
        return bool(poller.poll(0))


Child = TypeVar("Child", bound=FrameChild)
Answer = TypeVar("Answer")


class FrameChildren(Generic[Child]):
    """Processes that start on demand and are used again.

    Args:
        make: a new process, before its `begin`.
    """

    def __init__(self, make: Callable[[], Child]) -> None:
        self._make = make
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._lock = Lock()
        self._closed = False

    def call(self, ask: Callable[[Child], Answer]) -> Answer:
        """The result of `ask` for a process; blocking. If the process ends meanwhile, a new one takes the call: the
        kernel may have killed it for other processes' memory, and what stopped it may have stopped the idle ones too.

        Raises:
            EOFError: the second process has ended too, or `close` was called.
            InputError, GenerationError: two processes have ended at their start (503 if by a signal).
        """
        try:
            with self.borrow() as child:
                return ask(child)
        except EOFError:
            if self._closed:
                raise
        with self.borrow(new=True) as child:
            return ask(child)

    @contextmanager
    def borrow(self, new: bool = False) -> Iterator[Child]:
        """A process for the calling thread alone; blocks until it has started. It is killed if the block raises."""
        child = self._start() if new else self._take()
        try:
            yield child
        except BaseException:
            child.kill()
            raise
        if child.is_alive:
            with self._lock:
                self._idle.append(child)

    def close(self) -> None:
        """Kills all processes: threads in `call` raise EOFError."""
        with self._lock:
            self._closed = True
            for child in self._all:
                child.kill()

    def _take(self) -> Child:
        with self._lock:
            while self._idle:
                if (child := self._idle.pop()).is_alive:
                    return child
        return self._start()

    def _start(self) -> Child:
        """Raises as `call`; EOFError only after `close`."""
        for is_last in (False, True):
            child = self._make()
            with self._lock:
                self._all = {some for some in self._all if some.is_alive} | {child}
            try:
                child.begin()
                return child
            except EOFError:
                error = child.ended_at_start()
                if self._closed:
                    raise
                logger.error("%s", error)
                if is_last:
                    raise error from None
            except BaseException:
                child.kill()
                raise
        raise AssertionError
