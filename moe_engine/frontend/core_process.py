"""Parent-side handle of an engine core process: start, readiness, death, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from moe_engine.cluster.core_spec import REPORTED_FAILURE, CoreSpec
from moe_engine.core import messages
from moe_engine.core.engine_info import EngineInfo
from moe_engine.core.shared_status import SharedStatus
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.executor.options import RankGroupOptions
from moe_engine.models import registry
from moe_engine.processes.address_space import address_space_hint
from moe_engine.processes.child import ChildProcess
from moe_engine.processes.runtime_dir import RuntimeDir
from moe_engine.processes.stopped import HELD_SECONDS, StoppedProcessDetector
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import bind

logger = logging.getLogger("moe_engine")

CORE_MODULE = "moe_engine.cluster.core_main"
REPORT_SECONDS = 30.0
"""Time for the frontend to read the last message of a core that has exited."""
FAILED_CORE_SECONDS = 3.0
"""Time for a core that has reported its failure to kill its ranks, which may be stopped by a signal, and to exit."""


class CoreProcess:
    """Starts a core and monitors it.

    `dead` is None or a sentence with the process and the cause: the core's own last report, or how the process ended.
    Once set it never changes: all requests of a core get the same error.
    """

    from_core: zmq.Socket[bytes]
    """Bound socket that receives the messages of all groups' cores."""
    statuses: list[SharedStatus]
    """One per group."""
    to_core_addresses: list[str]
    """One per group, once the cores are ready."""

    def __init__(self, config: Any, *, name: str = "engine core", ranks: RankGroupOptions | None = None) -> None:
        self.name = name
        self.dead: str | None = None
        self._expected = False
        self._reported = threading.Event()
        """Whether the core's own report of its failure has been read."""
        self._lock = threading.Lock()
        self._listeners: list[tuple[Callable[[str], None], asyncio.AbstractEventLoop]] = []
        self._folder = RuntimeDir()
        folder = self._folder.path
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._killed_for = ""
        self.keys = ranks.keys if ranks is not None else None
        self._ready = context.socket(zmq.PULL)
        ready_address = f"ipc://{folder}/ready"
        bind(self._ready, ready_address)
        to_core, from_core, front_address = f"ipc://{folder}/to-core", f"ipc://{folder}/from-core", ""
        self.from_core = context.socket(zmq.PULL)
        self.from_core.setsockopt(zmq.RCVHWM, 0)
        bind(self.from_core, from_core)
        if ranks is not None and ranks.leader_address is not None:
            front_address = bind(self.from_core, ranks.leader_bind("*"), self.keys, ranks.leader_flag)
        spec = CoreSpec(
            config,
            to_core,
            from_core,
            ready_address,
            folder / "status",
            outside_models=registry.added(),
            import_path=list(sys.path),
            ranks=ranks,
            front_address=front_address,
        )
        num_groups = ranks.num_groups if ranks is not None else 1
        self.statuses = [SharedStatus(spec.status_path_of(group), create=True) for group in range(num_groups)]
        self.to_core_addresses = [spec.to_core_of(0)]
        self._child = ChildProcess(name, CORE_MODULE, spec, self._exited)
        self._held = StoppedProcessDetector(self._child.pid)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_ready(self) -> EngineInfo:
        """Blocks until the core is ready; returns its info. Raises like `poll_ready`."""
        while (info := self.poll_ready()) is None:
            pass
        return info

    def poll_ready(self) -> EngineInfo | None:
        """The core's info once it is ready; None if it is not within 50 ms.

        Raises:
            ConfigError: the core rejected the configuration or the checkpoint; its message.
            EngineDeadError: the core failed, died or is stopped by a signal; its own report if there is one.
        """
        try:
            if self._ready.poll(50):
                return self._take(messages.decode_from_core(self._ready.recv()))
            if self.dead and not self._ready.poll(0):
                self._cleanup()
                hint = address_space_hint()
                raise EngineDeadError(f"{self.dead} while starting; see its last log lines above{hint}")
            if (held := self._held.seconds()) > HELD_SECONDS:
                self.expect_exit()
                self.stop(0.0)
                name = f"{self._child.name} (pid {self.pid})"
                raise EngineDeadError(f"{name} has been stopped by a signal for {held:.1f} s while starting")
        except BaseException:
            self._ready.close(0)
            raise
        return None

    def _take(self, message: messages.FromCore) -> EngineInfo:
        """Returns the info of a ready core. For a failed one, waits for its exit and raises its error."""
        if isinstance(message, messages.CoreReady):
            self._ready.close(0)
            self.to_core_addresses = message.core_addresses
            return message.info
        assert isinstance(message, messages.CoreFailed)
        self._reported.set()
        self.expect_exit()
        self.stop(5.0)
        if message.error == "ConfigError":
            raise ConfigError(message.message)
        hint = address_space_hint()
        if message.traceback and not (hint and message.error in ("ImportError", "MemoryError")):
            logger.error("%s", message.traceback)
        raise EngineDeadError(message.message + hint)

    def kill_if_stopped(self) -> None:
        """Kills a ready core that has been stopped by a signal for `HELD_SECONDS`. Call it every `LOOK_SECONDS`."""
        if self.dead is None and (held := self._held.seconds()) > HELD_SECONDS:
            self.kill(f"it had been stopped by a signal for {held:.1f} s")

    def kill(self, reason: str) -> None:
        """Kills a core that is stuck; its requests fail with the reason."""
        self._killed_for = reason
        self._child.kill()

    def expect_exit(self) -> None:
        """Marks the coming exit as intended, not a failure."""
        self._expected = True

    def end(self, grace: float) -> None:
        """Waits up to `grace` seconds for the core to exit, then kills it."""
        self._child.stop(grace)

    def stop(self, grace: float) -> None:
        """`end`, then removes sockets and files: on the thread that reads them. Safe to call twice."""
        self.end(grace)
        self._cleanup()

    def on_death(self, listener: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        """Calls `listener(cause)` on `loop` when the core dies; immediately if it is dead."""
        with self._lock:
            self._listeners.append((listener, loop))
            dead = self.dead
        if dead:
            loop.call_soon(listener, dead)

    def note_failure(self, message: str) -> None:
        """Records the cause that the core, or a rank of its group, reported. The core is killed if it does not exit: it
        may be stopped by a signal."""
        with self._lock:
            known, self.dead = self.dead, self.dead or f"{self.name} (pid {self.pid}) failed: {message}"
        self._reported.set()
        if known is None:
            start_watched(f"end of {self.name}", self._end_failed, lambda message: None)

    def _end_failed(self) -> None:
        time.sleep(FAILED_CORE_SECONDS)
        if self._child.returncode is None:
            self.kill("it did not exit after its failure")

    def _exited(self, how: str, code: int) -> None:
        if code == REPORTED_FAILURE and not self._expected:
            self._reported.wait(REPORT_SECONDS)
        else:
            time.sleep(0.1)  # lets the report of a rank arrive
        ended = f"{how}: {self._killed_for}" if self._killed_for else how
        if not self._expected:
            logger.error("%s", ended)
        self._died(ended)

    def _cleanup(self) -> None:
        self.from_core.close(0)
        self._folder.remove()

    def _died(self, how: str) -> None:
        """Notifies all listeners; any thread. `how` is the cause unless the core reported one."""
        with self._lock:
            cause = self.dead = self.dead or how
            listeners = list(self._listeners)
        for listener, loop in listeners:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for it
                loop.call_soon_threadsafe(listener, cause)
