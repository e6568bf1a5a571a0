"""An engine core as the front end needs it, wherever it runs: addresses, boards, readiness, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_engine.engine.zmq_sockets import JobKeys
from moe_engine.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    import zmq

    from moe_engine.engine import messages
    from moe_engine.engine.status_board import StatusBoard


class CoreHandle(ABC):
    """`dead` is None or a sentence that names the process and why it serves no more: what it said itself before it
    went, or how it ended. It never changes, so that all requests of a core get the same one.
    """

    from_core: zmq.Socket[bytes]
    """Bound; what the cores of all groups send."""
    boards: list[StatusBoard]
    """Of all groups."""
    to_core_addresses: list[str]
    """Of all groups' cores, once they are ready."""
    keys: JobKeys | None = None
    """Of the sockets to cores on other nodes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead: str | None = None
        self._expected = False
        self._lock = threading.Lock()
        self._listeners: list[tuple[Callable[[str], None], asyncio.AbstractEventLoop]] = []

    @property
    @abstractmethod
    def pid(self) -> int:
        """0 where it is not known yet."""

    def wait_ready(self) -> dict[str, Any]:
        """Blocks until the core serves; returns its facts. Raises as `poll_ready`."""
        while (facts := self.poll_ready()) is None:
            pass
        return facts

    @abstractmethod
    def poll_ready(self, seconds: float = 0.05) -> dict[str, Any] | None:
        """The core's facts once it serves; None if it does not within `seconds`.

        Raises:
            ConfigError: the core refused the configuration or the checkpoint, with its message.
            EngineDeadError: the core failed, died or is held by a signal, with what it said.
        """

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Ends a core that does not move any more; whoever waits on it gets the reason."""

    def expect_exit(self) -> None:
        """The core was told to end: its exit is no failure."""
        self._expected = True

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Waits up to `grace` seconds for the core to end by itself, then ends it. Safe to call twice."""

    def on_death(self, listener: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        """Calls `listener(cause)` on `loop` when the core dies, at once if it has already."""
        with self._lock:
            self._listeners.append((listener, loop))
            dead = self.dead
        if dead:
            loop.call_soon(listener, dead)

    def note_failure(self, message: str) -> None:
        """The core said why it goes."""
        with self._lock:
            self.dead = self.dead or f"{self.name} (pid {self.pid}) failed: {message}"

    def _died(self, how: str) -> None:
        """Tells all listeners, from any thread. `how` counts where the core itself has said nothing."""
        with self._lock:
            cause = self.dead = self.dead or how
            listeners = list(self._listeners)
        for listener, loop in listeners:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(listener, cause)


def start_error(failure: messages.CoreFailed) -> ConfigError | EngineDeadError:
    """What to raise for a core that said why it cannot serve."""
    return (ConfigError if failure.error == "ConfigError" else EngineDeadError)(failure.message)
