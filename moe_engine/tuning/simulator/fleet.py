"""All replicas of a simulation, in order of simulated time, and their router."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_engine.frontend.dp_routing import Room
from moe_engine.tuning.simulator import expert_load
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.front_end import FrontEnd
from moe_engine.tuning.simulator.load_table import TableRouter
from moe_engine.tuning.simulator.rank_log import GroupLogs, RankLog
from moe_engine.tuning.simulator.recorder import Recorder, Running
from moe_engine.tuning.simulator.replica import Replica
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers, Workload

NEVER = math.inf


@dataclass(frozen=True)
class FleetSpec:
    """`num_replicas` engines of one kind. `method`: the router's, as `--load-balance-method`. `request_seconds`,
    `results_seconds`, `token_seconds`: work of the one frontend for each request, the results of each step and each
    token; 0: none."""

    replica: ReplicaSpec
    num_replicas: int = 1
    method: str = "total_tokens"
    faults: tuple[Fault, ...] = ()
    request_seconds: float = 0.0
    results_seconds: float = 0.0
    token_seconds: float = 0.0
    busy_seconds: float = 0.0
    """Time until the frontend has a core for a request that arrives while steps run."""
    way_seconds: float = 0.0
    """Time from the client's call until a request waits for the frontend."""
    recovery_seconds: float = 3.0
    """Pause of a replica after one of its ranks is lost, with `--elastic-ep`."""
    restart_seconds: float = 120.0
    """Time without service after a rank is lost, without `--elastic-ep`."""
    elastic: bool = False
    least_groups: int = 1
    """Min groups of a replica that can hold all experts; with fewer it restarts even with `--elastic-ep`."""


@dataclass
class Sample:
    """State of the whole fleet at a moment."""

    seconds: float
    running: int
    waiting: int
    used_tokens: int
    generated_tokens: int
    expert_skew: float = 0.0


@dataclass
class Counts:
    """Counts of a simulation so far. `verified`: steps of requests with drafts; `accepted`: drafts."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    generated: int = 0
    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    verified: int = 0
    accepted: int = 0


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
    faults: list[Fault] = field(default_factory=list)
    """Faults that occurred; `missed`: faults after the last answer."""
    missed: list[Fault] = field(default_factory=list)
    expert_load: dict[str, Any] = field(default_factory=dict)
    seams: list[dict[str, Any]] = field(default_factory=list)
    """Of a run in several processes: `parts.Seams.report`, and the processor time of each."""
    process_seconds: list[float] = field(default_factory=list)

    def take(self, counts: Counts) -> None:
        """Sets the counts of the whole run."""
        self.num_steps, self.busy_seconds, self.retractions = counts.num_steps, counts.busy_seconds, counts.retractions
        self.prompt_tokens, self.cached_tokens = counts.prompt_tokens, counts.cached_tokens
        self.accept_length = 1 + counts.accepted / counts.verified if counts.verified else None


class Fleet:
    """Runs a workload to its end: `run`. `now`: simulated seconds. `log`: gets the lines of the schedulers, which then
    plan every step. `halted`: set it to end the run before its next event."""

    def __init__(
        self,
        spec: FleetSpec,
        workload: Workload,
        *,
        answer_seconds: float = 0.0,
        seed: int = 0,
        log: RankLog | None = None,
    ) -> None:
        self.spec = spec
        self.recorder = Recorder(answer_seconds)
        self.samples: list[Sample] = []
        self._workload = workload
        self._is_open = isinstance(workload, Fixed)
        self._numbers = Numbers()
        self._order = itertools.count()
        self._arrivals: list[tuple[float, int, Arrival]] = []
        work = spec.request_seconds, spec.token_seconds, spec.results_seconds
        self._front = FrontEnd(*work) if any(work) or spec.busy_seconds or spec.way_seconds else None
        self._source = workload.first()
        self._faults = sorted(spec.faults, key=lambda fault: fault.seconds)
        groups = spec.replica.num_groups
        self.replicas = [
            Replica(spec.replica, self.recorder, self._ended, seed * 7919 + i, self._front, _logs_of(log, i * groups))
            for i in range(spec.num_replicas)
        ]
        self._places = [(replica, group) for replica in self.replicas for group in range(groups)]
        self._indices = {place: index for index, place in enumerate(self._places)}
        self._able = list(range(len(self._places)))
        scheduler = spec.replica.scheduler
        room = Room(scheduler.num_slots, scheduler.max_rows)
        self._router = TableRouter(len(self._places), spec.method, room)
        table = self._router.table
        self._loads = [table[i : i + groups] for i in range(0, len(table), groups)]
        """By replica."""
        self._clocks: list[tuple[float, int]] = []
        self._timed: set[int] = set()
        self._rids = itertools.count()
        self._drawn: Arrival | None = None
        self.now = 0.0
        self.halted = False
        self._arrived: Callable[[Arrival], None] | None = None
        self._draw()

    def run(
        self,
        progress: Callable[[int], None] = lambda count: None,
        interval: float = 0.0,
        arrived: Callable[[Arrival], None] | None = None,
    ) -> Outcome:
        """Simulates until every request has ended.

        Args:
            progress: gets the number of requests that have ended since the last call.
            interval: simulated seconds between samples; 0: none.
            arrived: gets each request when all engines have been simulated up to its arrival.
        """
        outcome, self._arrived = Outcome(self.recorder, self.samples), arrived
        reported, due = 0, 0.0 if interval else NEVER
        while not self.halted:
            arrival = self._arrivals[0][0] if self._arrivals else NEVER
            read = self._front.next_read if self._front is not None else NEVER
            behind = self._first_clock()
            now = min(arrival, read, behind)
            if now == NEVER:
                break
            self.now = now
            fault = self._faults[0].seconds if self._faults else NEVER
            if fault <= now:
                outcome.faults.append(self._faults.pop(0))
                self._fail(outcome.faults[-1])
                continue
            if now >= due:
                outcome.samples.append(self._sample(now))
                due = now - now % interval + interval
            if self._front is not None and read <= min(arrival, behind):
                self._enter(read, self._front.read())
            elif arrival <= behind:
                self._arrive(heapq.heappop(self._arrivals)[2])
            else:
                self._advance(min(arrival, read, fault, due))
            if len(self.recorder.answers) - reported >= 100:
                progress(len(self.recorder.answers) - reported)
                reported = len(self.recorder.answers)
        progress(len(self.recorder.answers) - reported)
        if interval:
            outcome.samples.append(self._sample(self.recorder.ended_at))
        outcome.missed = self._faults
        return self._summed(outcome)

    def discard(self) -> None:
        """Drops the cached tokens and the sessions of all schedulers, which cannot run any more."""
        for replica in self.replicas:
            for group in replica.groups:
                group.scheduler.kv_cache.tree.discard()
                group.scheduler.table.sessions.discard()

    # -- replicas, in order of time

    def _first_clock(self) -> float:
        """Clock of the active replica that is furthest behind."""
        clocks = self._clocks
        while clocks:
            clock, index = clocks[0]
            replica = self.replicas[index]
            if replica.is_active and replica.now == clock:
                return clock
            heapq.heappop(clocks)
            self._timed.discard(index)
            self._time(index)
        return NEVER

    def _time(self, index: int) -> None:
        """Adds a replica to the order of time, if it is active."""
        replica = self.replicas[index]
        if replica.is_active and index not in self._timed:
            self._timed.add(index)
            heapq.heappush(self._clocks, (replica.now, index))

    def _advance(self, until: float) -> None:
        """Steps the replica that is furthest behind, as far as no other event can affect it: to `until` if no arrival
        depends on an answer, else to the next replica's clock."""
        index = heapq.heappop(self._clocks)[1]
        self._timed.discard(index)
        replica = self.replicas[index]
        if self._is_open:
            while replica.is_active and replica.now < until:
                replica.step(until)
        else:
            replica.step(min(until, self._first_clock()))
        self._time(index)

    # -- requests

    def _draw(self) -> None:
        """Takes the next arrival that does not depend on an answer."""
        arrival = next(self._source, None)
        if arrival is not None:
            self._push(arrival, drawn=True)

    def _push(self, arrival: Arrival, drawn: bool = False) -> None:
        arrival.answer_ids = arrival.answer_ids or self._numbers.take(arrival.output_len + 1)
        arrival.blocks = None if arrival.is_unique else self._router.blocks_of(arrival.prompt_ids)
        heapq.heappush(self._arrivals, (arrival.seconds, next(self._order), arrival))
        self._drawn = arrival if drawn else self._drawn

    def _arrive(self, arrival: Arrival) -> None:
        if self._arrived is not None:
            self._arrived(arrival)
        if arrival is self._drawn:
            self._draw()
        if self._front is None:
            self._enter(arrival.seconds, arrival)
        else:
            busy = self.spec.busy_seconds and any(replica.runs_at(arrival.seconds) for replica in self.replicas)
            self._front.add(arrival, self.spec.way_seconds + (self.spec.busy_seconds if busy else 0.0))

    def _enter(self, moment: float, arrival: Arrival) -> None:
        """The frontend routes a request to a scheduler."""
        self._place(Running(arrival, moment), str(next(self._rids)), [])

    def _place(self, running: Running, rid: str, output_ids: list[int]) -> None:
        for replica, loads in zip(self.replicas, self._loads):
            replica.read_loads(loads)
        if not self._able:
            self.recorder.fail(running, running.arrival.seconds, "all ranks are lost")
            return
        blocks = running.arrival.blocks
        index = self._router.choose(self._able, blocks)
        replica, group = self._places[index]
        running.uncomputed = self._router.sent(index, blocks)
        refused = replica.add(group, running, rid, output_ids)
        self._time(index // self.spec.replica.num_groups)
        if refused is not None:
            self.recorder.fail(running, running.arrival.seconds, refused)
            self._followed_by(running.arrival, running.arrival.seconds)

    def _ended(self, replica: Replica, group: int, running: Running, now: float) -> None:
        arrival = running.arrival
        if arrival.blocks is not None:
            self._router.ended(self._indices[replica, group], arrival.blocks, running.answer[:-1])
        self._followed_by(arrival, now + self.recorder.answer_seconds)

    def _followed_by(self, arrival: Arrival, now: float) -> None:
        follower = self._workload.after(arrival, now)
        if follower is not None:
            self._push(follower)

    # -- faults

    def _fail(self, fault: Fault) -> None:
        """Loses a rank. With `--elastic-ep` its requests continue elsewhere and its replica pauses; without it, the
        requests of the replica fail and it restarts."""
        groups = self.spec.replica.num_groups
        index = fault.rank * len(self._places) // max(fault.num_ranks, 1)
        replica, group = self._places[index]
        if group in replica.lost:
            return
        if not self.spec.elastic or groups - len(replica.lost) <= self.spec.least_groups:
            places = [i for i, place in enumerate(self._places) if place[0] is replica]
            for place in places:
                self._router.forget(place)
            self._able = sorted({*self._able, *places})
            for running in replica.restart(fault.seconds, self.spec.restart_seconds):
                self.recorder.fail(running, fault.seconds, f"rank {fault.rank} was lost")
                self._followed_by(running.arrival, fault.seconds)
            return
        self._router.forget(index)
        moved = replica.lose(group, fault.seconds, self.spec.recovery_seconds)
        if index in self._able:
            self._able.remove(index)
        for running, rid, output_ids in moved:
            self._place(running, rid, output_ids)

    # -- results

    def _sample(self, now: float) -> Sample:
        for replica in self.replicas:
            replica.settle()
        groups = [group for replica in self.replicas for group in replica.groups]
        schedulers = [group.scheduler for group in groups]
        return Sample(
            now,
            sum(scheduler.table.num_running for scheduler in schedulers),
            sum(scheduler.num_waiting for scheduler in schedulers),
            sum(replica.used_tokens for replica in self.replicas),
            sum(replica.generated for replica in self.replicas),
            self.replicas[0].balancer.skew if self.replicas[0].balancer is not None else 0.0,
        )

    def counts(self) -> Counts:
        """Counts so far, of all replicas."""
        counts = Counts(
            sum(replica.num_steps for replica in self.replicas),
            sum(replica.busy_seconds for replica in self.replicas),
            sum(replica.generated for replica in self.replicas),
        )
        for replica in self.replicas:
            for group in replica.groups:
                totals = group.scheduler.totals
                counts.retractions += totals.retractions
                counts.prompt_tokens += totals.prompt_tokens
                counts.cached_tokens += totals.cached_tokens
                if group.scheduler.speculator is not None:
                    stats = group.scheduler.speculator.stats()
                    counts.verified += stats.verify_total
                    counts.accepted += sum(stats.accepted)
        return counts

    def _summed(self, outcome: Outcome) -> Outcome:
        outcome.take(self.counts())
        balancers = [replica.balancer for replica in self.replicas if replica.balancer is not None]
        if self.spec.replica.experts is not None:
            outcome.expert_load = expert_load.figures(self.spec.replica.experts, balancers)
        return outcome


def _logs_of(log: RankLog | None, first_group: int) -> GroupLogs | None:
    """Logs of the groups of a replica, by their indices in it."""
    return None if log is None else lambda index, clock: log.of(first_group + index, clock)
