"""Multi-process executor on rank 0: starts the other ranks, builds the core of rank 0's group, stops the ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_engine.cluster.control_server import ControlServer
from moe_engine.cluster.failure_detector import FailureDetector
from moe_engine.cluster.rank_process import LocalRanks
from moe_engine.core.dp_sync import DPSync, StepExchange
from moe_engine.core.executor import RankLost
from moe_engine.core.messages import CoreReady
from moe_engine.core.setup import engine_info, make_core
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import ConfigError
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import Failure, LeaderWorker, kernels_of
from moe_engine.executor.options import RankGroupOptions
from moe_engine.executor.plan_broadcast import PlanSender
from moe_engine.executor.process_groups import RankWorld, open_store, quieten_torch
from moe_engine.executor.progress import Progress
from moe_engine.processes.addresses import LOOPBACK
from moe_engine.processes.rendezvous_address import host_of
from moe_engine.processes.watched_thread import start_watched

if TYPE_CHECKING:
    from moe_engine.cluster.core_spec import CoreSpec
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")

STOP_SECONDS = 5.0
"""Time for followers to finish the steps sent to them."""
LEAVE_SECONDS = 3.0
"""Time for followers to receive the reason and log it."""


class Serving(NamedTuple):
    """A ready core. `run` serves until shutdown; `ready`: the message for the frontend."""

    run: Callable[[], None]
    transport: ZmqTransport
    ready: CoreReady


class MultiprocExecutor:
    """The ranks of one model replica. After a `RankLost` the owning process must exit by `os._exit`: one of its threads
    may hang in a collective.

    Args:
        spec: of this core; its folder holds the sockets of a single node.
    """

    def __init__(self, config: Any, options: RankGroupOptions, spec: CoreSpec, log_level: str) -> None:
        quieten_torch()
        self._config, self._spec = config, spec
        self._options = options
        self._progress = Progress(lambda: "starting")
        host = socket.gethostname()
        own = host, os.getpid()
        self.detector = FailureDetector(options.places, options.limits, self._progress.position, own)
        self._lost = threading.Event()
        self.detector.on_failure(lambda failure: self._lost.set())
        folder = spec.status_path.parent
        if options.leader_address is None:
            control, plans, steps = (f"ipc://{folder}/{name}" for name in ("ranks", "plans-0", "steps-0"))
        else:
            control, plans, steps = options.leader_bind(), options.leader_bind("*"), options.leader_bind("*")
        self._front_address = spec.front_address
        self._statuses = {
            place.group: SharedStatus(spec.status_path_of(place.group))
            for place in options.places
            if place.leads and place.node_rank != options.node_rank
        }
        self._control = ControlServer(control, options, self.detector, self._update_status)
        self.address = self._control.address
        """Address at which ranks join."""
        self._sender = PlanSender(plans, options.keys)
        self._exchange = StepExchange(0, options.num_groups, steps, options.keys) if options.num_groups > 1 else None
        self._ranks = LocalRanks(config, options, self.address, self.detector.died, log_level, spec)
        self._worker: LeaderWorker | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the followers on this node, by rank."""
        return self._ranks.pids

    def start(self) -> tuple[LeaderWorker, Worker]:
        """Blocks until every rank is ready. Returns the worker of rank 0's group, and rank 0's own worker inside it.

        Raises:
            ConfigError: a rank rejected the configuration or the checkpoint.
            RankLost: a rank failed, died or did not join; names it.
        """
        began = time.monotonic()
        prepared: list[Worker] = []
        start_watched("rank-start", partial(self._prepare, prepared), self.detector.give_up)
        while not (self.detector.all_loaded and prepared):
            self._ranks.find_held(self.detector.died)
            if self._lost.wait(0.01):
                self._raise()
        if not self._sender.wait_subscribed(self._options.followers_of(0), self._options.limits.silent):
            self.detector.give_up("a rank is ready but did not subscribe to plans")
            self._raise()
        self.detector.arm()
        logger.info("All %d ranks are ready after %.1f s", self._options.size, time.monotonic() - began)
        own = prepared[0]
        followers = self._options.following_ranks(0)
        self._worker = LeaderWorker(own, self._sender, self.detector, self._progress, followers=followers)
        return self._worker, own

    def serve(self) -> Serving:
        """Starts the ranks and builds the core of rank 0's group. Raises like `start`."""
        spec, config = self._spec, self._config
        driver, worker = self.start()
        dp_sync = self.dp_sync()
        wake = self._exchange.socket if self._exchange is not None else None
        transport = ZmqTransport(spec.to_core_address, spec.from_core_address, wake, spec.keys)
        status = SharedStatus(spec.status_path)
        core = make_core(
            config, driver, worker, transport, status,
            check=driver.check, dp_sync=dp_sync, first_group=self._options.first_group or 0,
        )  # fmt: skip
        status.write(ready=1, last_turn=time.monotonic())
        addresses = [transport.address, *self.detector.core_addresses[1:]]
        return Serving(core.run, transport, CoreReady(engine_info(config, worker), addresses))

    def dp_sync(self) -> DPSync | None:
        """Step sync with the schedulers of the other groups, after `start`; None with a single group."""
        if self._exchange is None:
            return None
        self._exchange.connect(self.detector.step_addresses)
        return DPSync(self._exchange, self.check)

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost."""
        if self._worker is not None:
            self._worker.check()

    def close(self) -> None:
        """Stops all ranks: after the steps in flight, or immediately if a rank was lost."""
        if self.detector.failure is None and self._worker is not None:
            self.detector.end()
            self._worker.close()
            self._ranks.stop(STOP_SECONDS)
        else:
            self.detector.give_up("startup was aborted")
            self._ranks.stop(LEAVE_SECONDS)
        self._sender.close()
        if self._exchange is not None:
            self._exchange.close()
        self._control.close()

    def _prepare(self, prepared: list[Worker]) -> None:
        options, place = self._options, self._options.places[0]
        try:
            if options.size > 1:
                self._rendezvous()
            worker = options.make_worker(self._config, place, self._progress)
        except Exception as error:
            logger.debug("rank 0 failed to start", exc_info=True)
            failure = Failure.of(error)
            self.detector.failed(0, failure.message, peer_lost=failure.peer_lost, config_error=failure.config_error)
            return
        self._progress.ready = True
        prepared.append(worker)
        steps = self._exchange.address if self._exchange is not None else ""
        self.detector.loaded(0, kernels_of(worker), step_address=steps)

    def _rendezvous(self) -> None:
        """Opens the store, sends its address to the other ranks, and joins them."""
        options = self._options
        host = LOOPBACK if options.leader_address is None else host_of(self.address)
        self._store = open_store(options, host)
        welcome = messages.Welcome(
            self._sender.address, host, self._store.port, self.detector.describe(0), self._front_address
        )
        self._control.invite(welcome)
        RankWorld(options, options.places[0], host, self._store.port, self._store).join()

    def _update_status(self, group: int, values: list[float]) -> None:
        if group in self._statuses:  # else its status file is on this node
            self._statuses[group].unpack(values)

    def _raise(self) -> None:
        failure = self.detector.failure or RankLost("a rank is lost")
        if self.detector.config_error:
            raise ConfigError(str(failure))
        raise failure
