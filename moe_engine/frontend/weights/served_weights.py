"""The checkpoint in force. Requests hold it while they run; an update waits until no request holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class ServedWeights:
    """Attributes: model_path, version: reported in the answers of requests that begin now. Bound to one event loop."""

    def __init__(self, model_path: str, version: str) -> None:
        self.model_path, self.version = model_path, version
        self.flags: dict[str, str] = {}
        """Flags of the launch that updates have replaced."""
        self._num_held = 0
        self._num_waiting = 0
        self._unused = asyncio.Event()
        self._open = asyncio.Event()
        self._whole = asyncio.Event()
        """Cleared while an update replaces the weights of paused requests."""
        for event in (self._unused, self._open, self._whole):
            event.set()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the end of an update."""
        return self._num_waiting

    def replace(self, model_path: str, version: str | None) -> None:
        """An update has replaced the weights. `version`: None: as before."""
        self.model_path, self.version = model_path, self.version if version is None else version
        self.flags = {"model_path": self.model_path, "weight_version": self.version}

    async def hold(self, given_up: Callable[[], bool]) -> bool:
        """Waits for the end of an update, if there is one. To be followed by `release`, unless the wait was given up.

        Args:
            given_up: called while the request waits, also after each `recheck`; True ends the wait.

        Returns:
            False if the wait was given up.
        """
        while not self._open.is_set():
            if given_up():
                return False
            self._num_waiting += 1
            try:
                await self._open.wait()
            finally:
                self._num_waiting -= 1
        self._num_held += 1
        self._unused.clear()
        return True

    async def until_whole(self) -> None:
        """Waits for the end of an update that replaces the weights of paused requests."""
        await self._whole.wait()

    def recheck(self) -> None:
        """Waiting requests call `given_up` again."""
        if not self._open.is_set():
            self._open.set()  # resumes all waiting requests; the update still runs
            self._open.clear()

    def release(self) -> None:
        self._num_held -= 1
        if not self._num_held:
            self._unused.set()

    @asynccontextmanager
    async def exclusive(self, seconds: float | None, on_close: Callable[[], None]) -> AsyncIterator[int]:
        """The time without requests: new ones wait. Yields the number that ran at its beginning.

        Args:
            seconds: for the running requests to end; None: generation is paused, they need not end.
            on_close: called once new requests wait.

        Raises:
            TimeoutError: requests still run.
        """
        running = self._num_held
        self._open.clear()
        try:
            on_close()
            if seconds is None:
                self._whole.clear()
            else:
                await asyncio.wait_for(self._unused.wait(), seconds)
            yield running
        finally:
            self._whole.set()
            self._open.set()
