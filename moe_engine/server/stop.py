"""A switch that ends the server from inside: the engine it serves is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StopSwitch:
    """Handed to the HTTP server; `stop_after` makes it end as SIGTERM would, after a while to answer clients."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    def connect(self, stop: Callable[[], None]) -> None:
        """The server tells how to end it."""
        self._stop = stop

    def stop_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._fire)

    def _fire(self) -> None:
        if self._stop is not None:
            self._stop()
