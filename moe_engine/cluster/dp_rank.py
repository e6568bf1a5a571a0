"""DP rank: a rank process that runs the scheduler (engine core) of its attention group, in lockstep with the others.

Rank 0, or the supervisor with --elastic-ep, monitors it like a follower and stops it with the group; its requests come
directly from the front end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import zmq

from moe_engine.cluster.heartbeat_client import LEAVE_SECONDS, HeartbeatClient, leave
from moe_engine.cluster.peers import identity_of_process
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.core.dp_sync import DPSync, StepExchange
from moe_engine.core.executor import RankLost, Survivors
from moe_engine.core.messages import CoreFailed, encode
from moe_engine.core.setup import engine_info, make_core
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import EngineDeadError
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import LeaderWorker, LocalWorker, call_one, kernels_of
from moe_engine.executor.plan_broadcast import PlanSender
from moe_engine.executor.process_groups import RankWorld
from moe_engine.executor.progress import Progress
from moe_engine.executor.survival import RankSurvival
from moe_engine.processes.addresses import own_address_towards
from moe_engine.processes.runtime_dir import RuntimeDir
from moe_engine.processes.zmq_sockets import connect

LAST_MESSAGE_MS = 500
"""Linger of a last message to the front end."""


class SchedulingRank:
    def __init__(self, spec: RankSpec) -> None:
        self._spec, self._place = spec, spec.place
        options, front = spec.options, spec.front
        group = spec.place.group
        self._folder = None if front is not None else RuntimeDir()
        if front is not None:
            folder = front.status_path.parent
            plans, steps = f"ipc://{folder}/plans-{group}", f"ipc://{folder}/steps-{group}"
            self._core_address = front.to_core_of(group)
            self._status = SharedStatus(front.status_path_of(group))
        else:
            assert self._folder is not None
            own = own_address_towards(options.leader_host)
            plans = steps = self._core_address = f"tcp://{own}:*"
            self._status = SharedStatus(self._folder.path / "status", create=True)
        self._sender = PlanSender(plans, options.keys)
        self._exchange = StepExchange(group, options.num_groups, steps, options.keys)
        self._progress = Progress(lambda: "starting", on_stride=lambda: self._heartbeat.beat_now())
        self._detector = _RemoteDetector(self)
        hello = messages.Hello(
            spec.place.rank, socket.gethostname(), os.getpid(), options.fingerprint, self._sender.address
        )
        self._own: Future[LocalWorker] = Future()
        self._heartbeat = HeartbeatClient(
            spec.control_address,
            identity_of_process(f"rank{spec.place.rank}"),
            hello,
            self._beat,
            options.limits,
            self._leave,
            self._call,
            self._detector.regroup,
            options.keys,
        )

    def run(self) -> int:
        """Returns the exit code of an orderly shutdown; on a failure the heartbeat thread exits the process."""
        try:
            core, worker, port = self._start()
            core.run()
        except Exception as error:
            self._heartbeat.send_failure(self._place.rank, error)
            time.sleep(LEAVE_SECONDS)  # until the leader stops this process
            return 1
        self._heartbeat.send(messages.Ended(self._place.rank))
        worker.close()
        self._sender.close()
        self._exchange.close()
        port.close()
        # a supervisor outlives its ranks; rank 0 may have exited
        self._heartbeat.close(acknowledged=self._spec.options.coverage is not None)
        if self._folder is not None:
            self._folder.remove()
        return 0

    def _start(self) -> tuple[Any, LeaderWorker, ZmqTransport]:
        spec, options = self._spec, self._spec.options
        welcome = self._heartbeat.welcome.result()
        own, followers = self._prepare(welcome), options.followers_of(self._place.group)
        if not self._sender.wait_subscribed(followers, options.limits.silent + options.limits.progress):
            raise EngineDeadError(f"{self._place.name}: a rank of the group did not subscribe to plans")
        self._own.set_result(own)
        self._progress.ready = True
        self._front_address = spec.front.from_core_address if spec.front is not None else welcome.front_address
        port = ZmqTransport(self._core_address, self._front_address, self._exchange.socket, options.keys)
        info = engine_info(spec.config, own) if options.coverage else None
        self._heartbeat.send(
            messages.Loaded(self._place.rank, kernels_of(own), port.address, self._exchange.address, info)
        )
        self._exchange.connect(self._heartbeat.go.result().step_addresses)
        worker = LeaderWorker(
            own,
            self._sender,
            self._detector,
            self._progress,
            partial(self._heartbeat.ask_others, self._place.rank) if options.coverage else None,
            rank=self._place.rank,
            regroups=RankSurvival.of(self._world, own),
        )
        dp_sync = DPSync(self._exchange, worker.check)
        core = make_core(
            spec.config,
            worker,
            own,
            port,
            self._status,
            check=worker.check,
            dp_sync=dp_sync,
            group=self._place.group,
            regroup=worker.regroup,
        )
        self._status.write(ready=1, last_turn=time.monotonic())
        return core, worker, port

    def _prepare(self, welcome: messages.Welcome) -> Any:
        spec = self._spec
        self._world = RankWorld(spec.options, spec.place, welcome.store_host, welcome.store_port)
        self._world.join()
        return spec.options.make_worker(spec.config, spec.place, self._progress)

    @property
    def world_size(self) -> int:
        return self._place.size

    def report_failure(self, message: str, *, peer_lost: bool, generation: int) -> None:
        """Reports a failed step to the leader."""
        self._heartbeat.send(messages.Failed(self._place.rank, message, peer_lost, generation=generation))

    def _leave(self, reason: str) -> NoReturn:
        """Reports to the front end as well: if the leader has stopped, no other process does."""
        if self._heartbeat.go.done():
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            with context.socket(zmq.PUSH) as front:
                connect(front, self._front_address, self._spec.options.keys)
                front.send(encode(CoreFailed(reason)))
                front.close(LAST_MESSAGE_MS)
            context.term()  # waits for what was sent
        leave(reason)

    def _call(self, method: str) -> Future[Any]:
        """Calls arrive only after all ranks are ready."""
        return call_one(self._own.result(), method)

    def _beat(self) -> messages.Beat:
        status = self._status.pack() if self._folder is not None else []
        return messages.Beat(self._place.rank, self._progress.position(), status)


class _RemoteDetector:
    """Implements `executor.leader_worker.Detector` by messages to the leader, which announces the surviving ranks."""

    failure: RankLost | None = None

    def __init__(self, rank: SchedulingRank) -> None:
        self._rank = rank
        self.survivors = Survivors((True,) * rank.world_size)
        self._listeners: list[Callable[[Survivors], None]] = []

    def slowest_steps_done(self) -> int:
        return 1 << 60  # the collectives of each step keep the group together

    def failed(self, rank: int, message: str, *, peer_lost: bool, generation: int = 0) -> None:
        self._rank.report_failure(message, peer_lost=peer_lost, generation=generation)

    def stepped(self, seconds: float) -> None: ...

    def on_failure(self, listener: Any) -> None: ...

    def on_survivors(self, listener: Callable[[Survivors], None]) -> None:
        self._listeners.append(listener)

    def regroup(self, survivors: Survivors) -> None:
        if survivors.generation <= self.survivors.generation or len(survivors.alive) != self._rank.world_size:
            return  # a duplicate announcement, or one of another world
        self.survivors = survivors
        for listener in self._listeners:
            listener(survivors)
