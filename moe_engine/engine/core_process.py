"""An engine core as its parent sees it."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from moe_engine.engine import messages
from moe_engine.engine.core_handle import CoreHandle, start_error
from moe_engine.engine.held_child import HeldChild
from moe_engine.engine.nodes.known_address import host_of
from moe_engine.engine.process import ChildProcess
from moe_engine.engine.ranks.addresses import own_address_towards
from moe_engine.engine.ranks.options import RankGroupOptions
from moe_engine.engine.run_folder import RunFolder
from moe_engine.engine.status_board import StatusBoard
from moe_engine.engine.zmq_sockets import JobKeys, bind
from moe_engine.errors import EngineDeadError
from moe_engine.models import registry

logger = logging.getLogger("moe_engine")

CORE_MODULE = "moe_engine.engine.core_main"
HELD_SECONDS = 5.0
"""A core that a signal holds for so long while it starts is ended. Later the watchdog finds it."""


@dataclass(frozen=True)
class CoreSpec:
    """All a core process needs; travels as a pickle. `config` is the resolved configuration.

    The addresses are of attention group 0; the cores of other groups on this node add their number, or take a free port
    each where the front end is on another node.
    """

    config: Any
    to_core_address: str
    from_core_address: str
    ready_address: str
    board_path: Path
    outside_models: list[tuple[str, str, str]]
    """Architectures the user registered in the parent, as `models.registry.register` takes them."""
    import_path: list[str]
    """The parent's sys.path, where their modules are found."""
    ranks: RankGroupOptions | None = None
    """Of the ranks that the core leads; None where it is alone."""
    front_address: str = ""
    """Where the front end listens for cores on other nodes."""

    @property
    def keys(self) -> JobKeys | None:
        """Of sockets between nodes."""
        return self.ranks.keys if self.ranks is not None else None

    def board_of(self, group: int) -> Path:
        return self.board_path.with_name(f"board-{group}") if group else self.board_path

    def to_core_of(self, group: int | str) -> str:
        """Of a group's core; of the process above them under a name."""
        shared = group == 0 or self.to_core_address.endswith(":*")
        return self.to_core_address if shared else f"{self.to_core_address}-{group}"


class CoreProcess(CoreHandle):
    """Starts a core and watches it.

    Args:
        front: where a front end on another node listens for what the core sends; None where it is this process.
    """

    def __init__(
        self,
        config: Any,
        *,
        name: str = "engine core",
        ranks: RankGroupOptions | None = None,
        front: str | None = None,
    ) -> None:
        super().__init__(name)
        self._folder = RunFolder()
        folder = self._folder.path
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._killed_for = ""
        self.keys = ranks.keys if ranks is not None else None
        self.control_address = ""
        """Where ranks on other nodes join, once the core listens there."""
        self._ready = context.socket(zmq.PULL)
        ready_address = f"ipc://{folder}/ready"
        bind(self._ready, ready_address)
        to_core, from_core, front_address = f"ipc://{folder}/to-core", f"ipc://{folder}/from-core", front or ""
        self.from_core = context.socket(zmq.PULL)
        self.from_core.setsockopt(zmq.RCVHWM, 0)
        if front is not None:
            to_core, from_core = f"tcp://{own_address_towards(host_of(front))}:*", front
        else:
            bind(self.from_core, from_core)
            if ranks is not None and ranks.leader_address is not None:
                front_address = bind(self.from_core, ranks.leader_bind("*"), self.keys, ranks.leader_flag)
        spec = CoreSpec(
            config,
            to_core,
            from_core,
            ready_address,
            folder / "board",
            outside_models=registry.added(),
            import_path=list(sys.path),
            ranks=ranks,
            front_address=front_address,
        )
        num_groups = ranks.num_groups if ranks is not None else 1
        self.boards = [StatusBoard(spec.board_of(group), create=True) for group in range(num_groups)]
        self.to_core_addresses = [spec.to_core_of(0)]
        self._child = ChildProcess(name, CORE_MODULE, spec, self._exited)
        self._held = HeldChild(self._child)

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll_ready(self, seconds: float = 0.05) -> dict[str, Any] | None:
        try:
            if self._ready.poll(int(seconds * 1000)):
                return self._take(messages.decode_from_core(self._ready.recv()))
            if self.dead and not self._ready.poll(0):
                self._cleanup()
                raise EngineDeadError(f"{self.dead} while starting; its last lines above say why")
            if (held := self._held.seconds()) > HELD_SECONDS:
                self.expect_exit()
                self.stop(0.0)
                name = f"{self._child.name} (pid {self.pid})"
                raise EngineDeadError(f"{name} has been stopped by a signal for {held:.1f} s while starting")
        except BaseException:
            self._ready.close(0)
            raise
        return None

    def _take(self, message: messages.FromCore) -> dict[str, Any] | None:
        """The facts of a core that is ready; raises for one that has said why it cannot be, and has ended then."""
        if isinstance(message, messages.CoreListens):
            self.control_address = message.address
            return None
        if isinstance(message, messages.CoreReady):
            self._ready.close(0)
            self.to_core_addresses = message.info["core_addresses"]
            return message.info
        assert isinstance(message, messages.CoreFailed)
        self.expect_exit()
        self.stop(5.0)
        if message.traceback:
            logger.error("%s", message.traceback)
        raise start_error(message)

    def kill(self, reason: str) -> None:
        self._killed_for = reason
        self._child.kill()

    def stop(self, grace: float) -> None:
        self._child.stop(grace)
        self._cleanup()

    def _exited(self, how: str) -> None:
        time.sleep(0.1)  # lets a last CoreFailed message arrive
        ended = f"{how}: {self._killed_for}" if self._killed_for else how
        if not self._expected:
            logger.error("%s", ended)
        self._died(ended)

    def _cleanup(self) -> None:
        self.from_core.close(0)
        self._folder.remove()
