"""Rank supervisor: parent process of all ranks, without a model, so that any rank may be lost.

It holds everything the world depends on: failure detector, control channel, rendezvous store. Every rank is a child
process with its own scheduler, which the frontend reaches directly.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from moe_engine.cluster.control_server import ControlServer
from moe_engine.cluster.core_spec import CoreSpec
from moe_engine.cluster.multiproc_executor import Serving
from moe_engine.cluster.rank_process import LocalRanks
from moe_engine.core.engine_info import EngineInfo
from moe_engine.core.executor import RankLost
from moe_engine.core.messages import CoreReady, GroupsLost
from moe_engine.core.transport import ZmqTransport
from moe_engine.elastic.detector import ElasticDetector
from moe_engine.elastic.messages import Ready, Regroup, StepFailed, decode_to_supervisor
from moe_engine.elastic.survivors import Survivors
from moe_engine.errors import ConfigError
from moe_engine.executor import messages as rank_messages
from moe_engine.executor.options import RankGroupOptions
from moe_engine.executor.process_groups import open_store, quieten_torch
from moe_engine.planning.parallelism.resolve_elastic import Coverage
from moe_engine.processes.addresses import LOOPBACK
from moe_engine.processes.watched_thread import start_watched

logger = logging.getLogger("moe_engine")

STOP_SECONDS = 5.0
"""Time for ranks to exit after an orderly shutdown."""
LEAVE_SECONDS = 3.0
"""Time for ranks to receive the reason and log it."""
LOOK_SECONDS = 0.01


class SupervisorControl(ControlServer):
    """The control channel of a process that is not a rank."""

    decode = staticmethod(decode_to_supervisor)

    def __init__(self, address: str, options: RankGroupOptions, detector: ElasticDetector) -> None:
        self.info: EngineInfo | None = None
        """The facts sent by rank 0's core."""
        self._elastic = detector
        super().__init__(address, options, detector, first_rank=0)
        detector.on_survivors(self._regroup)

    def _take(self, message: Any) -> None:
        if isinstance(message, StepFailed):
            self._elastic.failed(
                message.rank, message.message, peer_lost=message.peer_lost, generation=message.generation
            )
        elif isinstance(message, Ready):
            self.info = message.info if message.rank == 0 else self.info
        else:
            super()._take(message)

    def _regroup(self, survivors: Survivors) -> None:
        for rank in self._elastic.ranks:
            self._send_rank(rank, Regroup(survivors))


class RankSupervisor:
    """The ranks of one model on one node, each an attention group.

    Args:
        spec: of this process; its folder holds the sockets and status files.
        coverage: of the ranks that may be lost.
    """

    def __init__(
        self, config: Any, options: RankGroupOptions, spec: CoreSpec, coverage: Coverage, log_level: str = "info"
    ) -> None:
        quieten_torch()
        self._options, self._spec = options, spec
        self._events: queue.SimpleQueue[RankLost | Survivors] = queue.SimpleQueue()
        self._detector = ElasticDetector(options.places, options.limits, coverage)
        self._detector.on_failure(self._events.put)
        self._detector.on_survivors(self._events.put)
        control = f"ipc://{spec.status_path.parent}/ranks"
        self._control = SupervisorControl(control, options, self._detector)
        self._ranks = LocalRanks(config, options, control, self._detector.died, log_level, spec, first_rank=0)
        self._detector.on_survivors(  # kills them: a process that was only stopped must not resume
            lambda survivors: self._ranks.end(rank for rank, alive in enumerate(survivors.alive) if not alive)
        )
        self._served = False

    def serve(self) -> Serving:
        """Starts the ranks. Raises like `start`."""
        info = self.start()
        transport = ZmqTransport(f"{self._spec.to_core_address}-supervisor", self._spec.from_core_address)
        return Serving(partial(self.run, transport.send), transport, info)

    def start(self) -> CoreReady:
        """Blocks until every rank is ready; returns the message for the frontend.

        Raises:
            ConfigError: a rank rejected the configuration or the checkpoint.
            RankLost: a rank failed, died or did not join; names it.
        """
        began = time.monotonic()
        start_watched("store", self._open, self._detector.give_up)
        while not self._detector.all_loaded:
            if self._detector.failure is not None:
                raise (
                    ConfigError(str(self._detector.failure)) if self._detector.config_error else self._detector.failure
                )
            self._ranks.find_held(self._detector.died)
            time.sleep(LOOK_SECONDS)
        self._detector.arm()
        logger.info("All %d ranks are ready after %.1f s", self._options.size, time.monotonic() - began)
        assert self._control.info is not None
        return CoreReady(self._control.info, self._detector.core_addresses)

    def run(self, report: Callable[[GroupsLost], None]) -> None:
        """Blocks until the orderly shutdown of the ranks.

        Args:
            report: called with the lost groups, each time the remaining groups continue.

        Raises:
            RankLost: the survivors cannot continue.
        """
        alive = (True,) * self._options.size
        while not self._detector.ending:
            try:
                event = self._events.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, RankLost):
                raise event
            report(
                GroupsLost([group for group, lives in enumerate(alive) if lives > event.alive[group]], event.losses[-1])
            )
            alive = event.alive
        self._served = True

    def close(self) -> None:
        """Stops all ranks; after an orderly shutdown they exit by themselves."""
        if not self._served:
            self._detector.give_up("startup was aborted")
        self._ranks.stop(STOP_SECONDS if self._served else LEAVE_SECONDS)
        self._control.close()

    def _open(self) -> None:
        """Opens the store and sends its address to the ranks."""
        options = self._options
        try:
            self._store = open_store(options, LOOPBACK)
        except Exception as error:
            self._detector.give_up(f"the rendezvous store cannot be opened: {error}")
            return
        leader = f"the rank supervisor (pid {os.getpid()})"
        self._control.invite(rank_messages.Welcome("", LOOPBACK, self._store.port, leader))
