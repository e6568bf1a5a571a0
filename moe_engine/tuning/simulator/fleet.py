"""All replicas of a simulation, in order of simulated time, with the router in front of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_engine.frontend.dp_routing import Router
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.recorder import Recorder, Running
from moe_engine.tuning.simulator.replica import Replica, ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers, Workload


@dataclass(frozen=True)
class FleetSpec:
    """`num_replicas` engines of one kind. `method`: of the router, as `--load-balance-method`."""

    replica: ReplicaSpec
    num_replicas: int = 1
    method: str = "auto"
    faults: tuple[Fault, ...] = ()
    recovery_seconds: float = 3.0
    """Pause of a replica after one of its ranks is lost, with `--elastic-ep`."""
    restart_seconds: float = 120.0
    """Time without service after a rank is lost, without `--elastic-ep`."""
    elastic: bool = False
    max_concurrency: int = 0


@dataclass
class Sample:
    """State of the whole fleet at a moment."""

    seconds: float
    running: int
    waiting: int
    used_tokens: int
    generated_tokens: int


@dataclass
class Outcome:
    """Result of a simulation."""

    recorder: Recorder
    samples: list[Sample] = field(default_factory=list)
    num_steps: int = 0
    busy_seconds: float = 0.0
    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accept_length: float | None = None
    num_draft_steps: int = 0


class Fleet:
    """Runs a workload to its end: `run`."""

    def __init__(self, spec: FleetSpec, workload: Workload, *, answer_seconds: float = 0.0, seed: int = 0) -> None:
        self.spec = spec
        self.recorder = Recorder(answer_seconds)
        self._workload = workload
        self._is_open = isinstance(workload, Fixed)
        self._numbers = Numbers()
        self._order = itertools.count()
        self._arrivals: list[tuple[float, int, Arrival]] = []
        self._source = workload.first()
        self._faults = sorted(spec.faults, key=lambda fault: fault.seconds)
        self.replicas = [
            Replica(spec.replica, self.recorder, self._ended, seed * 7919 + index) for index in range(spec.num_replicas)
        ]
        groups = spec.replica.num_groups
        self._places = [(replica, group) for replica in self.replicas for group in range(groups)]
        self._able = list(range(len(self._places)))
        self._router = Router(len(self._places), spec.method)
        self._rids = itertools.count()
        self._drawn: Arrival | None = None
        self._draw()

    def run(self, progress: Callable[[int], None] = lambda count: None, interval: float = 0.0) -> Outcome:
        """Simulates until every request has ended.

        Args:
            progress: gets the number of requests that have ended since the last call.
            interval: simulated seconds between samples; 0: none.
        """
        outcome = Outcome(self.recorder)
        reported, due = 0, 0.0
        while True:
            active = [replica for replica in self.replicas if replica.is_active]
            arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            if not active and not self._arrivals:
                break
            replica = min(active, key=lambda replica: replica.now, default=None)
            now = arrival if replica is None else min(arrival, replica.now)
            if self._faults and self._faults[0].seconds <= now:
                self._fail(self._faults.pop(0))
                continue
            if interval and now >= due:
                outcome.samples.append(self._sample(now))
                due = now - now % interval + interval
            if replica is None or arrival <= replica.now:
                self._route(heapq.heappop(self._arrivals)[2])
            else:
                replica.step(self._horizon(arrival, replica, active))
            if len(self.recorder.answers) - reported >= 100:
                progress(len(self.recorder.answers) - reported)
                reported = len(self.recorder.answers)
        progress(len(self.recorder.answers) - reported)
        return self._summed(outcome)

    def _horizon(self, arrival: float, replica: Replica, active: Sequence[Replica]) -> float:
        """Time until which nothing can reach this replica."""
        horizon = min(arrival, self._faults[0].seconds if self._faults else arrival)
        if self._is_open or len(active) == 1:
            return horizon
        return min(horizon, *(other.now for other in active if other is not replica))

    # -- requests

    def _draw(self) -> None:
        """Takes the next arrival that depends on no answer."""
        arrival = next(self._source, None)
        if arrival is not None:
            self._push(arrival, drawn=True)

    def _push(self, arrival: Arrival, drawn: bool = False) -> None:
        arrival.answer_ids = arrival.answer_ids or self._numbers.take(arrival.output_len + 1)
        heapq.heappush(self._arrivals, (arrival.seconds, next(self._order), arrival))
        self._drawn = arrival if drawn else self._drawn

    def _route(self, arrival: Arrival) -> None:
        if arrival is self._drawn:
            self._draw()
        self._place(Running(arrival), str(next(self._rids)), [])

    def _place(self, running: Running, rid: str, output_ids: list[int]) -> None:
        for index, (replica, group) in enumerate(self._places):
            load = self._router.loads[index]
            load.num_requests, load.num_tokens = replica.groups[group].load
        if not self._able:
            self.recorder.fail(running, running.arrival.seconds, "all ranks are lost")
            return
        replica, group = self._places[self._router.choose(self._able)]
        refused = replica.add(group, running, rid, output_ids)
        if refused is not None:
            self.recorder.fail(running, running.arrival.seconds, refused)
            self._followed_by(running.arrival, running.arrival.seconds)

    def _ended(self, replica: Replica, group: int, running: Running, now: float) -> None:
        self._followed_by(running.arrival, now + self.recorder.answer_seconds)

    def _followed_by(self, arrival: Arrival, now: float) -> None:
        follower = self._workload.after(arrival, now)
        if follower is not None:
            self._push(follower)

    # -- faults

    def _fail(self, fault: Fault) -> None:
        """A rank is lost. With `--elastic-ep` its requests continue elsewhere and its replica pauses; without, the
        requests of the replica fail and it restarts."""
        groups = self.spec.replica.num_groups
        index = fault.rank * len(self._places) // max(fault.num_ranks, 1)
        replica, group = self._places[index]
        if not self.spec.elastic or groups - len(replica.lost) < 2:
            for running in replica.restart(fault.seconds, self.spec.restart_seconds):
                self.recorder.fail(running, fault.seconds, f"rank {fault.rank} was lost")
                self._followed_by(running.arrival, fault.seconds)
            return
        moved = replica.lose(group, fault.seconds, self.spec.recovery_seconds)
        if index in self._able:
            self._able.remove(index)
        for running, rid, output_ids in moved:
            self._place(running, rid, output_ids)

    # -- results

    def _sample(self, now: float) -> Sample:
        groups = [group for replica in self.replicas for group in replica.groups]
        schedulers = [group.scheduler for group in groups]
        return Sample(
            now,
            sum(scheduler.table.num_running for scheduler in schedulers),
            sum(scheduler.num_waiting for scheduler in schedulers),
            sum(scheduler.kv_cache.num_used for scheduler in schedulers),
            sum(group.generated for group in groups),
        )

    def _summed(self, outcome: Outcome) -> Outcome:
        outcome.num_steps = sum(replica.num_steps for replica in self.replicas)
        outcome.busy_seconds = sum(replica.busy_seconds for replica in self.replicas)
        verified = accepted = 0
        for replica in self.replicas:
            for group in replica.groups:
                totals = group.scheduler.totals
                outcome.retractions += totals.retractions
                outcome.prompt_tokens += totals.prompt_tokens
                outcome.cached_tokens += totals.cached_tokens
                if group.scheduler.speculator is not None:
                    stats = group.scheduler.speculator.stats()
                    verified += stats.verify_total
                    accepted += sum(stats.accepted)
        outcome.num_draft_steps = verified
        outcome.accept_length = 1 + accepted / verified if verified else None
        return outcome
