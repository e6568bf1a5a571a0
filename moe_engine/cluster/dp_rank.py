"""DP rank: a rank process that runs the scheduler (engine core) of its attention group, in lockstep with the others.

Rank 0 monitors it like a follower and stops it with the group; its requests come directly from the frontend.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import zmq

from moe_engine.cluster.heartbeat_client import LEAVE_SECONDS, HeartbeatClient, leave
from moe_engine.cluster.peers import identity_of_process
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.core.dp_sync import DPSync, StepExchange
from moe_engine.core.executor import RankLost
from moe_engine.core.loop import EngineCore
from moe_engine.core.messages import CoreFailed, encode
from moe_engine.core.setup import make_core
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import EngineDeadError
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import LeaderWorker, kernels_of
from moe_engine.executor.plan_broadcast import PlanSender
from moe_engine.executor.process_groups import RankWorld
from moe_engine.executor.progress import Progress
from moe_engine.processes.addresses import own_address_towards
from moe_engine.processes.runtime_dir import RuntimeDir
from moe_engine.processes.zmq_sockets import connect

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker

LAST_MESSAGE_MS = 500
"""Linger of a last message to the frontend."""


class SchedulingRank:
    """A `RankLossPolicy` may replace its parts: the class attributes, and the methods `_make_...` and `_serve`."""

    world_class: type[RankWorld] = RankWorld
    exchange_class: type[StepExchange] = StepExchange

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
        self._exchange = self.exchange_class(group, options.num_groups, steps, options.keys)
        self._progress = Progress(lambda: "starting", on_stride=lambda: self._heartbeat.beat_now())
        hello = messages.Hello(
            spec.place.rank,
            socket.gethostname(),
            os.getpid(),
            options.fingerprint,
            self._sender.address,
            options.checkpoint,
        )
        self._heartbeat = self._make_heartbeat(
            spec.control_address,
            identity_of_process(f"rank{spec.place.rank}"),
            hello,
            self._beat,
            options.limits,
            self._leave,
            options.keys,
        )

    def run(self) -> int:
        """Returns the exit code of an orderly shutdown; on a failure the heartbeat thread exits the process."""
        try:
            own, port = self._start()
            worker = self._make_worker(own)
            self._serve(worker, own, port)
        except Exception as error:
            self._heartbeat.send_failure(self._place.rank, error)
            time.sleep(LEAVE_SECONDS)  # until the leader stops this process
            return 1
        self._heartbeat.send(messages.Ended(self._place.rank))
        worker.close()
        self._sender.close()
        self._exchange.close()
        port.close()
        self._heartbeat.close()
        if self._folder is not None:
            self._folder.remove()
        return 0

    def _start(self) -> tuple[Worker, ZmqTransport]:
        """Loads the model and waits for the other ranks."""
        spec, options = self._spec, self._spec.options
        welcome = self._heartbeat.welcome.result()
        own, followers = self._prepare(welcome), options.followers_of(self._place.group)
        if not self._sender.wait_subscribed(followers, options.limits.silent + options.limits.progress):
            raise EngineDeadError(f"{self._place.name}: a rank of the group did not subscribe to plans")
        self._progress.ready = True
        self._front_address = spec.front.from_core_address if spec.front is not None else welcome.front_address
        port = ZmqTransport(self._core_address, self._front_address, self._exchange.socket, options.keys)
        self._report_loaded(
            messages.Loaded(self._place.rank, kernels_of(own), port.address, self._exchange.address), own
        )
        self._exchange.connect(self._heartbeat.go.result().step_addresses)
        return own, port

    def _make_heartbeat(self, *args: Any) -> HeartbeatClient:
        return HeartbeatClient(*args)

    def _make_worker(self, own: Worker) -> LeaderWorker:
        rank = self._place.rank
        detector = RemoteDetector(
            lambda message, peer_lost: self._heartbeat.send(messages.Failed(rank, message, peer_lost))
        )
        followers = self._spec.options.following_ranks(self._place.group)
        return LeaderWorker(own, self._sender, detector, self._progress, rank=rank, followers=followers)

    def _report_loaded(self, loaded: messages.Loaded, own: Worker) -> None:
        self._heartbeat.send(loaded)

    def _make_core(self, worker: LeaderWorker, own: Worker, port: ZmqTransport, dp_sync: DPSync) -> EngineCore:
        core = make_core(
            self._spec.config, worker, own, port, self._status,
            check=worker.check, dp_sync=dp_sync, group=self._place.group,
            first_group=self._spec.options.first_group or 0,
        )  # fmt: skip
        self._status.write(ready=1, last_turn=time.monotonic())
        return core

    def _serve(self, worker: LeaderWorker, own: Worker, port: ZmqTransport) -> None:
        """Returns after an orderly shutdown."""
        self._make_core(worker, own, port, DPSync(self._exchange, worker.check)).run()

    def _prepare(self, welcome: messages.Welcome) -> Worker:
        spec = self._spec
        self._world = self.world_class(spec.options, spec.place, welcome.store_host, welcome.store_port)
        self._world.join()
        return spec.options.make_worker(spec.config, spec.place, self._progress)

    def _leave(self, reason: str) -> NoReturn:
        """Reports to the frontend as well: if the leader has stopped, no other process does."""
        if self._heartbeat.go.done():
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            with context.socket(zmq.PUSH) as front:
                connect(front, self._front_address, self._spec.options.keys)
                front.send(encode(CoreFailed(reason)))
                front.close(LAST_MESSAGE_MS)
            context.term()  # waits until queued messages are sent
        leave(reason)

    def _beat(self) -> messages.Beat:
        status = self._status.pack() if self._folder is not None else []
        return messages.Beat(self._place.rank, self._progress.position(), status)


class RemoteDetector:
    """Implements `executor.leader_worker.Detector`: reports failures of this rank's steps, which the leader's detector
    judges.

    Args:
        report: called with the failure and `peer_lost`.
    """

    failure: RankLost | None = None

    def __init__(self, report: Callable[[str, bool], None]) -> None:
        self._report = report

    def slowest_steps_done(self) -> int:
        return 1 << 60  # the collectives of each step keep the group together

    def failed(self, rank: int, message: str, *, peer_lost: bool) -> None:
        self._report(message, peer_lost)

    def stepped(self, seconds: float) -> None: ...

    def on_failure(self, listener: Any) -> None: ...
