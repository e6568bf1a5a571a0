"""The event loop of an offline engine on a daemon thread: synchronous callers need no loop of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from moe_engine.errors import EngineDeadError
from moe_engine.frontend.core_process import CoreProcess
from moe_engine.frontend.start import stop_cores
from moe_engine.processes.watched_thread import start_watched

T = TypeVar("T")


class EngineLoop:
    """Has no reference to its `Engine`, whose finalizer would never run otherwise.

    Args:
        cores: stopped when the loop fails or is abandoned.
    """

    def __init__(self, cores: Sequence[CoreProcess]) -> None:
        self._cores = cores
        self._running: set[Future[Any]] = set()
        self._begins = Lock()
        """Held while work begins, so that the end of the loop sees all of it."""
        self._is_closed = False
        self._failure = ""
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = start_watched("moe-engine", partial(_run, self.loop), self._failed)

    @property
    def is_open(self) -> bool:
        """False after the end, and in a forked child, where the thread does not exist."""
        return not self._is_closed and self._is_ours

    def submit(self, work: Coroutine[Any, Any, T]) -> Any:
        """A future of the work. Raises EngineDeadError: the loop is closed or failed, or belongs to another process."""
        if not self._is_ours:
            work.close()
            raise EngineDeadError(f"this Engine belongs to process {self._pid}; make one after the fork")
        with self._begins:
            if self._is_closed:
                work.close()
                raise EngineDeadError("this Engine was shut down")
            if self._failure:
                work.close()
                raise EngineDeadError(self._failure)
            future = _begin(work, self.loop)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. Raises as `submit`."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin_close(self) -> bool:
        """Refuses further work. False: not open."""
        if not self._is_ours:  # in a forked child the lock may never be released
            return False
        with self._begins:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    def close(self, last: Coroutine[Any, Any, object]) -> None:
        """Runs the last work, then ends tasks, loop and thread. Pending calls of other threads get an error."""
        try:
            _begin(last, self.loop).result()
        except RuntimeError:  # the loop has failed
            last.close()
            return
        self._end_pending("this Engine was shut down")
        self.loop.call_soon_threadsafe(_wind_up, self.loop)
        self.thread.join(5.0)

    def abandon(self) -> None:
        """Stops the cores and ends the loop: after a failed start, at garbage collection or interpreter exit.

        Does not wait for the loop: this may run in the loop's own thread.
        """
        if not self._is_ours:  # a forked child, which owns neither cores nor loop
            return
        self._is_closed = True
        stop_cores(self._cores)
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(_wind_up, self.loop)

    @property
    def _is_ours(self) -> bool:
        return self._pid == os.getpid()

    def _failed(self, message: str) -> None:
        with self._begins:
            self._failure = message
        stop_cores(self._cores)
        self._end_pending(message)

    def _end_pending(self, message: str) -> None:
        for future in list(self._running):
            with contextlib.suppress(InvalidStateError):  # it has ended meanwhile
                future.set_exception(EngineDeadError(message))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _begin(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
    """A task of the loop. Unlike with `asyncio.run_coroutine_threadsafe`, its future may be given an error before the
    task has ended, which is then cancelled."""
    future: Future[T] = Future()

    def begin() -> None:
        if future.done():
            work.close()
            return
        task = loop.create_task(work)
        task.add_done_callback(partial(_settle, future))
        future.add_done_callback(lambda _: _cancel(task, loop))

    loop.call_soon_threadsafe(begin)
    return future


def _settle(future: Future[T], task: asyncio.Task[T]) -> None:
    with contextlib.suppress(InvalidStateError):  # it had an error before
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _cancel(task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
    if not task.done():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(task.cancel)


WIND_UP_SECONDS = 1.0
"""Longest wait for tasks that have been cancelled."""


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels a loop's tasks, and stops it once they have ended. Python cannot close the stream of a task that is
    destroyed in the middle of it (RuntimeError: aclose(): asynchronous generator is already running).

    A task that `_cancel` has cancelled may be closing its stream, which a second cancellation would interrupt."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: loop.stop())
    loop.call_later(WIND_UP_SECONDS, loop.stop)
