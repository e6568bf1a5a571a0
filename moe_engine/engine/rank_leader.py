"""Rank 0's side of a group: brings all ranks up, hands out the worker that drives them, takes all of them down."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from moe_engine.engine import rank_messages as messages
from moe_engine.engine.rank_control import RankControl
from moe_engine.engine.rank_options import RankGroupOptions
from moe_engine.engine.rank_process import LocalRanks
from moe_engine.engine.rank_watch import RankWatch
from moe_engine.engine.rank_world import join_world, open_store, quieten_torch
from moe_engine.errors import ConfigError
from moe_engine.worker.plan_channel import PlanSender
from moe_engine.worker.rank_group import Failure, RankGroupWorker, RankLost, kernels_of
from moe_engine.worker.rank_progress import Progress

logger = logging.getLogger("moe_engine")

STOP_SECONDS = 5.0
"""For followers to finish the steps that they were sent."""
LEAVE_SECONDS = 0.6
"""For followers to hear and to say why they leave."""


class RankGroup:
    """The ranks of one engine core. The process that holds it ends by `os._exit` after a `RankLost`: a thread of it may
    hang in a collective.

    Args:
        folder: of the run, for the sockets of a single node.
    """

    def __init__(self, config: Any, options: RankGroupOptions, folder: Path, log_level: str = "info") -> None:
        quieten_torch()
        self._config = config
        self._options = options
        self._progress = Progress(lambda: "starting")
        host = socket.gethostname()
        self.watch = RankWatch(options.places, options.limits, self._progress.position, (host, os.getpid()))
        self._lost = threading.Event()
        self.watch.on_verdict(lambda verdict: self._lost.set())
        if options.leader_address is None:
            control, plans = f"ipc://{folder}/ranks", f"ipc://{folder}/plans"
        else:
            control, plans = options.leader_tcp(), options.leader_tcp("*")
        self._control = RankControl(control, options, self.watch)
        self._sender = PlanSender(plans)
        self._ranks = LocalRanks(config, options, control, self.watch.died, log_level)
        self._worker: RankGroupWorker | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the followers on this node, by rank."""
        return self._ranks.pids

    def start(self) -> tuple[RankGroupWorker, Any]:
        """Returns when every rank is ready: the worker of the group, and rank 0's own inside it.

        Raises:
            ConfigError: a rank refused the configuration or the checkpoint.
            RankLost: a rank failed, died or did not come; names it.
        """
        began = time.monotonic()
        prepared: list[Any] = []
        threading.Thread(target=self._prepare, args=(prepared,), name="rank-start", daemon=True).start()
        while not (self.watch.all_loaded and prepared):
            if self._lost.wait(0.01):
                self._raise()
        if not self._sender.wait_subscribed(self._options.size - 1, self._options.limits.silent):
            self.watch.give_up("a rank is ready but does not listen for plans")
            self._raise()
        self.watch.arm()
        logger.info("All %d ranks are ready after %.1f s", self._options.size, time.monotonic() - began)
        self._worker = RankGroupWorker(prepared[0], self._sender, self.watch, self._progress)
        return self._worker, prepared[0]

    def check(self) -> None:
        """Raises `RankLost` when the group has lost a rank."""
        if self._worker is not None:
            self._worker.check()

    def close(self) -> None:
        """Ends all ranks: after the steps in work, or at once if the group lost one."""
        if self.watch.verdict is None and self._worker is not None:
            self.watch.end()
            self._worker.close()
            self._ranks.stop(STOP_SECONDS)
        else:
            self.watch.give_up("the start was broken off")
            self._ranks.stop(LEAVE_SECONDS)
        self._sender.close()
        self._control.close()

    def _prepare(self, prepared: list[Any]) -> None:
        options, place = self._options, self._options.places[0]
        try:
            self._store = open_store(options)
            leader = self.watch.describe(0)
            self._control.invite(
                messages.Welcome(
                    self._sender.address, options.leader_host, self._store.port, leader, options.generation
                )
            )
            join_world(options, place, options.leader_host, self._store.port, self._store)
            worker = options.make_worker(self._config, place, self._progress)
        except Exception as error:
            logger.debug("rank 0 failed to start", exc_info=True)
            failure = Failure.of(error)
            self.watch.failed(0, failure.message, peer_lost=failure.peer_lost, config_error=failure.config_error)
            return
        self._progress.ready = True
        prepared.append(worker)
        self.watch.loaded(0, kernels_of(worker))

    def _raise(self) -> None:
        verdict = self.watch.verdict or RankLost("a rank is lost")
        if self.watch.config_error:
            raise ConfigError(str(verdict))
        raise verdict
