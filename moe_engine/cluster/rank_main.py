"""Rank process (follower): joins the group, builds its worker and runs the leader's plans until stopped.

Run as ``python -m moe_engine.cluster.rank_main`` by `cluster.rank_process`, specification on standard input. Three
threads: this one receives plans, the worker's thread runs them, the heartbeat thread sends beats and exits the process
when the leader requests it or is lost.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NoReturn

from moe_engine import logs
from moe_engine.cluster.heartbeat_client import LEAVE_SECONDS, HeartbeatClient, leave
from moe_engine.cluster.kv_reports import KVReports
from moe_engine.cluster.peers import identity_of_process
from moe_engine.cluster.rank_process import RankSpec
from moe_engine.core.kv_transfer.open import follow_transfers
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import MoeEngineError
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import kernels_of
from moe_engine.executor.options import plan_name
from moe_engine.executor.plan_broadcast import KV_REPORT, Masks, PlanReceiver, Run, Step, Stop
from moe_engine.executor.process_groups import RankWorld, quieten_torch
from moe_engine.executor.progress import Progress
from moe_engine.models import registry
from moe_engine.processes.child import read_spec
from moe_engine.types import StepPlan, StepResult

if TYPE_CHECKING:
    from moe_engine.cluster.dp_rank import SchedulingRank
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")


def main() -> NoReturn:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in core_main: before torch is imported
    quieten_torch()
    spec: RankSpec = read_spec()
    logs.setup_logging(spec.log_level, spec.place.name)
    sys.path.extend(entry for entry in spec.import_path if entry not in sys.path)
    for architecture in spec.outside_models:
        registry.register(*architecture)
    rank = _scheduling(spec) if spec.place.leads else Follower(spec)
    code = 1
    try:
        code = rank.run()
    except BaseException:
        logger.critical("This rank failed", exc_info=True)
    finally:
        os._exit(code)  # a thread that hangs in a collective must not keep the process


def _scheduling(spec: RankSpec) -> SchedulingRank:
    from moe_engine.cluster.rank_loss import policy_of

    return policy_of(spec.options).make_scheduling_rank(spec)


class Follower:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._rank = spec.place.rank
        self._reported_idle = False
        self._kv_reports = KVReports()
        self._progress = Progress(lambda: "starting", on_stride=lambda: self._heartbeat.beat_now())
        options, limits = spec.options, spec.options.limits
        hello = messages.Hello(
            self._rank, socket.gethostname(), os.getpid(), options.fingerprint, checkpoint=options.checkpoint
        )
        self._heartbeat = HeartbeatClient(
            spec.control_address,
            identity_of_process(f"rank{self._rank}"),
            hello,
            self._beat,
            limits,
            leave,
            keys=spec.options.keys,
        )

    def run(self) -> int:
        """Returns the exit code of an orderly shutdown; on a failure the heartbeat thread exits the process."""
        try:
            self._run()
        except Exception as error:
            self._heartbeat.send_failure(self._rank, error)
            time.sleep(LEAVE_SECONDS)  # until the leader stops this process
            return 1
        return 0

    def _run(self) -> None:
        welcome = self._heartbeat.welcome.result()
        receiver = PlanReceiver(welcome.plan_address, plan_name(self._rank), self._spec.options.keys)
        preparing = ThreadPoolExecutor(1, "rank-start").submit(self._prepare, welcome)
        preparing.add_done_callback(self._prepared)
        while True:
            for report in self._kv_reports.take():
                receiver.answer(KV_REPORT, RankAnswer(self._rank, list(report)))
            try:
                message = receiver.receive(self._kv_reports.poll_seconds)
            except MoeEngineError as error:
                self._heartbeat.send_failure(self._rank, error)
                continue
            if isinstance(message, Step):  # plans arrive only after all ranks are ready
                self._progress.begin(message.plan)
                self._kv_reports.planned(message.plan)
                if self._reported_idle:
                    self._heartbeat.beat_now()  # so that the leader has this rank's position if this step hangs
                self._execute(preparing.result(), message.plan).add_done_callback(self._stepped)
            elif isinstance(message, Masks):
                preparing.result().sample(message.masks)
            elif isinstance(message, Run):  # blocks: later plans wait on the worker's thread anyway
                call = preparing.result().run_call(message.method, message.args)
                wait([call])
                receiver.answer(message.id, RankAnswer.of(self._rank, call))
            elif isinstance(message, Stop):
                break
        if preparing.done() and not preparing.exception():
            preparing.result().close()
        self._heartbeat.close()

    def _execute(self, worker: Worker, plan: StepPlan) -> Future[StepResult]:
        return worker.launch(plan, reports_drafts=False).result if plan.masked else worker.execute(plan)

    def _prepare(self, welcome: messages.Welcome) -> Worker:
        spec = self._spec
        RankWorld(spec.options, spec.place, welcome.store_host, welcome.store_port).join()
        worker = spec.options.make_worker(spec.config, spec.place, self._progress)
        first = spec.options.first_group or 0
        follow_transfers(spec.config, worker, first + spec.place.group, spec.place.rank % spec.options.group_size)
        worker.report_storage(self._kv_reports.add)
        self._progress.ready = True
        self._heartbeat.send(messages.Loaded(self._rank, kernels_of(worker)))
        return worker

    def _prepared(self, future: Future[Worker]) -> None:
        if (error := future.exception()) is not None:
            self._heartbeat.send_failure(self._rank, error)

    def _stepped(self, future: Future[Any]) -> None:
        self._progress.done(future)
        error = future.exception()
        if error is not None:
            self._heartbeat.send_failure(self._rank, error)

    def _beat(self) -> messages.Beat:
        position = self._progress.position()
        self._reported_idle = position.step < 0
        return messages.Beat(self._rank, position)


if __name__ == "__main__":
    main()
