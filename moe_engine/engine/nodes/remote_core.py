"""The core of a replica on another node, as the front end sees it: what `nodes.desk` hears of it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any, Protocol

import zmq

from moe_engine.engine import messages
from moe_engine.engine.core_handle import CoreHandle, start_error
from moe_engine.engine.nodes import messages as news
from moe_engine.engine.nodes.known_address import KnownAddress
from moe_engine.engine.run_folder import RunFolder
from moe_engine.engine.status_board import StatusBoard
from moe_engine.engine.zmq_sockets import JobKeys, bind
from moe_engine.errors import EngineDeadError

logger = logging.getLogger("moe_engine")

KILL_SECONDS = 2.0
"""For a node to say that a core has ended which it was told to end."""


class Desk(Protocol):
    """The part of `nodes.desk.NodeDesk` that a core needs."""

    def tell_leader(self, replica: int, message: news.ToNode) -> bool:
        """Sends to the node with the replica's core; False if it is not there."""

    def serves(self, replica: int) -> None: ...

    def end(self) -> None: ...

    def release(self, replica: int) -> None: ...


class RemoteCore(CoreHandle):
    """Methods with words of the node are called from the desk's thread."""

    def __init__(
        self, desk: Desk, replica: int, node_rank: int, num_groups: int, front: KnownAddress, keys: JobKeys | None
    ) -> None:
        super().__init__(f"engine core DP{replica} on node {node_rank}")
        self.replica, self._desk = replica, desk
        self._pid = 0
        self._folder = RunFolder()
        self.boards = [StatusBoard(self._folder.path / f"board-{i}", create=True) for i in range(num_groups)]
        self.to_core_addresses = []
        self.from_core = zmq.Context.instance().socket(zmq.PULL)
        self.from_core.setsockopt(zmq.RCVHWM, 0)
        self.keys = keys
        self.front_address = bind(self.from_core, front.bind("*"), keys, f"--dist-init-addr {front.text}")
        self._start: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._stopped = False

    @property
    def pid(self) -> int:
        return self._pid

    def poll_ready(self, seconds: float = 0.05) -> dict[str, Any] | None:
        try:
            found = self._start.get(timeout=seconds)
        except queue.Empty:
            if self.dead:
                raise EngineDeadError(f"{self.dead} while starting") from None
            return None
        if isinstance(found, Exception):
            raise found
        self.to_core_addresses = found["core_addresses"]
        self._desk.serves(self.replica)
        return found

    def kill(self, reason: str) -> None:
        self._desk.tell_leader(self.replica, news.Kill(self.replica, reason))

    def expect_exit(self) -> None:
        super().expect_exit()
        self._desk.end()

    def stop(self, grace: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        end_at_once = news.Kill(self.replica, "told to end")
        if not self._ended.wait(grace) and self._desk.tell_leader(self.replica, end_at_once):
            self._ended.wait(KILL_SECONDS)
        self.from_core.close(0)
        self._folder.remove()
        self._desk.release(self.replica)

    # -- words of its node

    def started(self, name: str, pid: int) -> None:
        self.name, self._pid = name, pid

    def ready(self, info: dict[str, Any]) -> None:
        for board in self.boards:
            board.write(ready=1, last_turn=time.monotonic())
        self._start.put(info)

    def start_failed(self, message: str, error: str = "EngineDeadError") -> None:
        self._start.put(start_error(messages.CoreFailed(message, error)))
        self._ended.set()

    def show(self, boards: list[list[float]]) -> None:
        for board, values in zip(self.boards, boards):
            board.unpack(values)

    def ended(self, how: str) -> None:
        if not self._expected:
            logger.error("%s", how)
        self._ended.set()
        self._died(how)

    def lost(self, cause: str) -> None:
        """Its node is."""
        who = f"{self.name} (pid {self._pid})" if self._pid else self.name
        self.ended(f"{who} is lost: {cause}")
