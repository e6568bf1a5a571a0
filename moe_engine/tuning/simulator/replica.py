"""One engine of a simulation: its schedulers step together, on a simulated clock.

The order of events is that of `moe_engine.core.loop`: the next step is planned while the step before it runs, then the
result of that step is applied. With attention DP the groups step in lockstep, and prompts wait for their turn. Empty
steps, by which idle groups join the others, change no scheduler and are left out; a prefill delayer counts them.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.scheduler import NEEDS_RESULT
from moe_engine.tuning.costs.step_cost import StepCost
from moe_engine.tuning.simulator.expert_load import Balancer
from moe_engine.tuning.simulator.front_end import FrontEnd
from moe_engine.tuning.simulator.group import Group
from moe_engine.tuning.simulator.group_turns import GroupTurns
from moe_engine.tuning.simulator.joint_step import GroupPlans, busiest, joint_cost
from moe_engine.tuning.simulator.load_table import LoadTable
from moe_engine.tuning.simulator.rank_log import GroupLogs
from moe_engine.tuning.simulator.recorder import Recorder, Running
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.run_counts import Flight, RunCounts
from moe_engine.tuning.simulator.runs import Runs, RunStep
from moe_engine.tuning.simulator.step_noise import StepNoise
from moe_engine.types import StepPlan

MAX_JUMP = 64
"""Max steps without any event that are taken together."""
SLOWER = 1.02
"""Bound on the growth of a step's cost over such a jump."""
BENT = 1e-6
"""Distance of the cost in the middle from the line between the ends, over the cost, up to which it counts as linear."""
HELD_POLL_SECONDS = 0.02
"""As `moe_engine.core.loop`."""
EndedHandler = Callable[["Replica", int, Running, float], None]


class Replica:
    """Attributes:
    now: simulated clock of its core, in seconds.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        recorder: Recorder,
        ended: EndedHandler,
        seed: int = 0,
        front: FrontEnd | None = None,
        logs: GroupLogs | None = None,
    ) -> None:
        self.spec, self.now, self._logs = spec, 0.0, logs
        self._front = front
        self._recorder, self._ended, self._seed = recorder, ended, seed
        self._noise = StepNoise(spec.step_spread, seed)
        self.groups = [self._new_group(i) for i in range(spec.num_groups)]
        self.lost: set[int] = set()
        self.balancer = Balancer(spec.experts) if spec.experts is not None else None
        self._turns = GroupTurns(spec.scheduler, spec.num_groups, lambda: self.now)
        self._turns.begin(self.groups, self.lost)
        self._exact = spec.exact or self._turns.has_delayer or logs is not None
        self._holds = not self._exact and not spec.scheduler.host_tier_tokens  # which has steps of copies alone
        self._runs, self._counts = Runs(spec.num_groups), RunCounts(recorder, front, self._exact)
        self._awake: set[int] = set()
        """Groups whose scheduler plans the next step: groups with requests that are not in a run."""
        self._held: set[int] = set()
        """Groups with waiting prompts and no decodes, which have no step until prompts may be computed."""
        self._num_live = 0
        self._changed: set[int] = set()
        """Groups whose load is another one than the last one read, beyond the tokens of their runs."""
        self._flight: Flight | None = None
        self._collected = 0.0
        """Time at which the newest result was applied."""
        self._ends = 0
        """Requests that have ended since the newest step was in flight."""
        self._back_at = 0.0  # end of the last restart
        self.num_steps = 0
        self.busy_seconds = 0.0

    def _new_group(self, index: int) -> Group:
        def clock() -> float:
            return self.now

        log = None if self._logs is None else self._logs(index, clock)
        group = Group(self.spec.scheduler, clock, self.spec.acceptance, self._seed * 1009 + index, log)
        if group.scheduler.delays is not None:
            group.scheduler.delays.shared = self.spec.num_groups > 1
        return group

    @property
    def is_active(self) -> bool:
        """Whether there is a step in flight or a request."""
        return self._flight is not None or self._num_live > 0

    def runs_at(self, moment: float) -> bool:
        """Whether a step runs at a moment up to which it has been simulated."""
        return self.is_active or self.now > moment

    def read_loads(self, loads: LoadTable) -> None:
        """Sets the unfinished work of each group, as its production scheduler reports it."""
        runs, requests, uncomputed = self._runs, loads.num_requests, loads.num_uncomputed
        for index in self._changed:  # a few: one by one takes less time than an assignment to a list of places
            group = self.groups[index]
            requests[index], uncomputed[index] = len(group.running), group.load_uncomputed
            runs.set_load(index, group.load_tokens - group.run_rows * group.run_from)
        self._changed.clear()
        runs.read_loads(loads.num_tokens)

    @property
    def generated(self) -> int:
        """Answer tokens so far."""
        step = self._runs.step
        known = sum(group.scheduler.totals.generated_tokens for group in self.groups)
        return known + sum(group.run_rows * (step - group.run_from) for group in self.groups)

    @property
    def used_tokens(self) -> int:
        """Tokens in the KV pools that requests hold, with those of runs, without their chunks."""
        step, groups = self._runs.step, self.groups
        known = sum(group.scheduler.kv_cache.num_used for group in groups)
        return known + sum(group.run_rows * (group.earlier + step - group.run_from) for group in groups)

    def settle(self) -> None:
        """Brings the counts of waiting and computed prompts in the schedulers up to date, as single steps have them."""
        for index in list(self._runs.finishing):
            self._leave_run(index)

    def add(self, index: int, running: Running, rid: str, output_ids: list[int] | None = None) -> str | None:
        """Gives a request to a scheduler. Returns the reason if it is refused, or None."""
        if not self.is_active:
            self.now = max(self.now, running.entered + self.spec.idle_seconds * (running.entered > self.now))
        if self._flight is not None:
            self._flight.end += self.spec.arrival_seconds
        group, running.group = self.groups[index], index
        refused = group.add(running, rid, output_ids or [])
        if refused is not None:
            return refused
        self._num_live += 1
        self._changed.add(index)
        if index in self._runs.members:
            self._runs.wait(index, holds=True)
            group.queued_in_run(self._runs.sums)
        elif index not in self._held:
            self._awake.add(index)
        return None

    # -- steps

    def step(self, until: float) -> None:
        """Plans a step and applies the result of the one before; several steps if nothing happens in them before
        `until`."""
        if not self._exact and self._jump(until):
            return
        hold = len(self.groups) > 1 and not self._turns.open
        self._wake(hold)
        runs, launched = self._runs, self.now
        planned = self._plan(hold)
        of_runs = runs.planned(hold) if runs.members else None
        prefilled = planned.prefilled or (of_runs is not None and of_runs[2] > 0)
        is_step = bool(planned.shapes) or of_runs is not None
        if not is_step and self._flight is None and not hold and self._num_live:
            self._wait_for_sessions(until)
        if self._turns.has_delayer and (is_step or hold):
            self._turns.agree(self.groups, planned.groups, prefilled)
        elif not self._turns.has_delayer and len(self.groups) > 1:
            self._take_turns(prefilled)
        if not is_step:
            self._collect(None)
            return
        flight = self._launch(planned, of_runs)
        if planned.loaded:  # the copies of the ranks, during the step
            flight.end = max(flight.end, flight.began + planned.loaded * self.spec.load_seconds)
        flight.hold, flight.launched, flight.relaunched, flight.drained = hold, launched, self.now, planned.drained
        self._collect(flight)

    def _wake(self, hold: bool) -> None:
        """Groups whose run ends, and held groups when their turn comes, plan the next step."""
        if self._runs.members:
            for index in self._runs.leaving(hold):
                beyond = self.groups[index].beyond_end(self._runs, hold and index in self._runs.holding)
                if beyond is None:
                    self._leave_run(index)
                else:
                    self._runs.end_rows(index, *beyond)
            for index in list(self._runs.finishing):
                self._runs.join_prompt(index)
        if not hold and self._held:
            self._awake |= self._held
            self._held.clear()

    def _plan(self, hold: bool) -> GroupPlans:
        """Plans of the awake groups; those whose prompts wait for their turn without a decode are held instead."""
        planned = GroupPlans([], set())
        holds_waiting = hold and self._holds
        for index in sorted(self._awake):
            group = self.groups[index]
            if group.is_idle:
                self._awake.discard(index)
                continue
            if holds_waiting and group.only_waits:
                self._hold(index)
                continue
            plan = group.plan(hold)
            while plan is NEEDS_RESULT:
                planned.drained = min(planned.drained, index)
                self._apply(index)
                plan = group.plan(hold)
            if isinstance(plan, StepPlan):
                planned.add(index, plan)
            elif holds_waiting and group.scheduler.num_waiting:
                self._hold(index)
        return planned

    def _hold(self, index: int) -> None:
        self._awake.discard(index)
        self._held.add(index)

    def _wait_for_sessions(self, until: float) -> None:
        """Nothing runs, and requests wait because sessions are held: as an idle core, plans again after a while."""
        if not any(self.groups[index].scheduler.is_held_back for index in self._awake):
            raise RuntimeError("the scheduler has requests and plans no step")
        after = self.now + HELD_POLL_SECONDS
        self.now = min(after, until) if until > self.now else after

    def _take_turns(self, prefilled: bool, steps: int = 1) -> None:
        """`steps`: those that have been planned. Requests whose last step is among them do not count."""
        waiting, most = len(self._runs.waiting) + len(self._held), 0
        for index in self._awake:
            scheduler = self.groups[index].scheduler
            waiting += scheduler.num_waiting > 0
            most = max(most, len(scheduler.table.decodes))
        num_groups, exactly = len(self.groups) - len(self.lost), self._turns.counts_rows
        for planned in range(1, steps + 1):
            self._turns.after(num_groups, waiting, prefilled, max(most, self._runs.rows_after(planned, exactly)))

    def _launch(self, planned: GroupPlans, of_runs: RunStep | None) -> Flight:
        """The step of the groups that are in no run, and of those in runs."""
        shapes = planned.shapes
        cost = joint_cost(self.spec.costs, shapes if of_runs is None else [*shapes, *of_runs[0]], self._skew)
        if self.balancer is not None:
            self.balancer.passed(1)
        begin = self.now if self._flight is None else max(self.now, self._flight.end)
        seconds = self._noise.seconds(cost.seconds)
        self.num_steps += 1
        self.busy_seconds += seconds
        rows, tokens, most_rows = planned.rows, planned.tokens, planned.most_rows
        chunks: set[int] = set()
        if of_runs is not None:
            run_shapes, run_rows, run_tokens = of_runs
            rows, tokens = rows + run_rows, tokens + run_tokens
            most_rows = max(most_rows, *[shape.decode_rows for shape in run_shapes])
            chunks |= self._runs.chunking if run_tokens else chunks
        is_graph = not tokens and self.spec.graphs.size_for(most_rows) is not None
        return Flight(cost, begin + seconds, planned.groups, rows, tokens, begin, chunks=chunks, is_graph=is_graph)

    @property
    def _skew(self) -> float:
        return self.spec.expert_skew if self.balancer is None else self.balancer.skew

    def _decode_cost(self, ahead: int = 0) -> StepCost:
        """Cost of the step `ahead` steps after the next one, in which all groups are in a run without chunks."""
        shape = self._runs.shape(ahead)
        return self.spec.costs.step(busiest([shape], shape.global_tokens, self._skew))

    def _collect(self, behind: Flight | None) -> None:
        """Applies the step in flight; then `behind` is in flight."""
        sent = 0.0
        if self._flight is not None:
            sent = self._flight.rows * self.spec.sent_seconds  # the results of the step before are sent meanwhile
            self.now = max(self.now, self._flight.end)
            self._record(self._flight)
            previous, self._collected = self._collected, self.now
            for index in sorted(self._flight.pending):
                self._apply(index)
            if self._runs.members:
                self._counts.count(self._runs, self.groups, self._flight, previous, self.now)
                self._changed.update([index for index in self._flight.chunks if self.groups[index].run_rows])
                for index, sampled in self._flight.sampled.items():
                    for event in self.groups[index].first_tokens(sampled, self.now):
                        self._tell(index, self.groups[index], event)
                for index in self._runs.joined:
                    self._tell(index, self.groups[index], self.groups[index].first_token())
                for index in sorted(self._runs.ending):
                    self._changed.add(index)
                    for event in self.groups[index].go_on(index, self._runs) or self._leave_run(index, behind):
                        self._tell(index, self.groups[index], event)
        self._flight, ends, self._ends = behind, self._ends, 0
        if behind is None:
            return
        for index in list(self._runs.joined):
            self._leave_run(index)
        behind.end += ends * self.spec.end_seconds + sent
        if not self.spec.overlap:
            self._collect(None)
        elif not self._exact:
            for index in sorted(behind.pending):
                self._begin_run(index, behind)

    def _record(self, flight: Flight) -> None:
        if self._recorder.keeps_details:
            self._recorder.steps.append((flight.rows, flight.tokens, flight.end - flight.began))

    def _apply(self, index: int) -> None:
        """Gives a group the result of the step in flight."""
        flight = self._flight
        if flight is None or index not in flight.pending:
            raise RuntimeError(f"group {index} has no step in flight")
        flight.pending.discard(index)
        self.now = max(self.now, flight.end)
        group = self.groups[index]
        self._changed.add(index)
        for event in self._counts.finish(group, flight, self.now):
            self._tell(index, group, event)

    def _tell(self, index: int, group: Group, event: RequestEvent) -> None:
        running, delay = group.running[event.rid], 0.0
        if self._front is not None and self._flight is not None:
            self._front.tokens(self.now, min(len(event.token_ids), 1))
            delay = self._front.delay(self.now, self._flight.rows)
        if event.token_ids:
            self._recorder.tokens(running, len(event.token_ids), self.now, delay)
            group.load_tokens += len(event.token_ids)
            if running.uncomputed:
                group.computed(running)
        reason = event.finish_reason
        if reason is None:
            return
        group.remove(event.rid)
        self._num_live -= 1
        self._ends += 1
        if reason.type == "abort":
            self._recorder.fail(running, self.now, str(reason.message))
        else:
            self._recorder.end(
                running, self.now, cached_tokens=event.cached_tokens, retractions=event.retractions, delay=delay
            )
        self._ended(self, index, running, self.now + delay)

    # -- runs

    def _begin_run(self, index: int, flight: Flight) -> None:
        """Begins a run with the step in flight, if possible; the group's scheduler plans again after the run."""
        group = self.groups[index]
        holds = len(self.groups) > 1 and not self._turns.open
        if not group.running or (len(self.groups) > 1 and self._begin_chunks(index, flight, holds)):
            return
        limit = group.run_limit(holds)
        if limit < 1:
            return
        shape, waits = group.decode_shape(), group.scheduler.num_waiting > 0
        group.begin_run(shape.decode_rows, self._runs)
        self._runs.join(index, shape, limit, group.rows_after(limit), holds and waits, waits)
        self._awake.discard(index)
        flight.pending.discard(index)
        self._changed.add(index)

    def _begin_chunks(self, index: int, flight: Flight, holds: bool) -> bool:
        """Begins a run with chunks with the step in flight, if possible."""
        group = self.groups[index]
        limits = group.chunk_limits()
        if limits is None:
            return False
        shape, most = group.decode_shape(), group.most_in_a_row
        if holds and shape.decode_rows and not limits.decodes:
            return False
        if not holds and (not (limits.chunks or limits.last) or (shape.decode_rows and limits.in_a_row >= most)):
            return False
        group.begin_run(shape.decode_rows, self._runs, limits.size)
        self._runs.join_chunks(index, shape, limits, most)
        self._awake.discard(index)
        flight.pending.discard(index)
        self._changed.add(index)
        if limits.begins_with_chunk:
            flight.chunks.add(index)
            if sampled := group.scheduler.last_sampled:
                flight.sampled[index] = sampled
        return True

    def _leave_run(self, index: int, flight: Flight | None = None) -> list[RequestEvent]:
        """Applies the steps of the run to the scheduler; the newest step is in flight, if the group has a part in
        it. Returns the ends of requests.

        Args:
            flight: that step, if the result of the step before it is being applied.
        """
        group, runs = self.groups[index], self._runs
        flight, events = flight or self._flight, list[RequestEvent]()
        chunking, in_flight = group.chunk_size > 0, "decode"
        if (runs.step > group.run_from or group.earlier) and index not in runs.fresh:
            last = self._counts.held_at if chunking else self._collected
            for request in group.scheduler.table.decodes:
                group.running[request.rid].last = last
        if chunking:
            if flight is not None and index in flight.chunks:
                in_flight = "last" if index in runs.finishing else "chunk"
            elif not (group.run_rows or index in runs.joined):
                in_flight = ""
            group.end_chunks(runs, index, in_flight, flight.launched_by(index) if flight is not None else 0.0)
        else:
            events = group.end_run(runs.sums)
        runs.leave(index)
        self._awake.add(index)
        self._changed.add(index)
        if flight is not None and in_flight and group.scheduler.in_flight:
            flight.pending.add(index)
            flight.chunks.discard(index)
            flight.sampled.pop(index, None)
        return events

    def _jump(self, until: float) -> bool:
        """Takes several decode steps together, if all groups are in a run and no prompt waits for its turn."""
        flight, runs = self._flight, self._runs
        waits = self._awake or self._held or runs.holding or runs.chunking
        if flight is None or flight.end >= until or waits or not runs.members or self.spec.step_spread:
            return False
        room, sent = until - flight.end, runs.total_rows * self.spec.sent_seconds
        first = self._decode_cost().seconds + sent
        most = MAX_JUMP if self.balancer is None else self.balancer.left  # steps of an equal skew
        steps = min(runs.next_end - runs.step, MAX_JUMP, most, 1 + int(min(room / first, MAX_JUMP)))
        while steps >= 2:
            cost = self._decode_cost(steps - 1)
            last = cost.seconds + sent
            total = steps * (first + last) / 2
            is_even = last <= SLOWER * first and self._is_linear(first, last, steps, sent)
            if total - last <= room and is_even:
                break
            steps = min(steps - 1, 1 + int(room / last) if is_even else steps // 2)
        else:
            return False
        if len(self.groups) > 1:
            self._take_turns(False, steps)
        if self.balancer is not None:
            self.balancer.passed(steps)
        self.now = begin = flight.end
        self._record(flight)
        self._counts.count(runs, self.groups, flight, self._collected, self.now)
        self.now = begin + total - last
        gap = (self.now - begin) / (steps - 1)
        self._recorder.gaps.add_steps(begin, gap, steps - 1, runs.total_rows)
        if self._front is not None:
            for number in range(1, steps):
                self._front.tokens(begin + number * gap, runs.total_rows)
        runs.step += steps - 1
        runs.sums.add(first, last - (last - first) / (steps - 1), steps - 1)
        self._collected = self.now
        self._flight = Flight(cost, begin + total, flight.pending, runs.total_rows, began=self.now)
        self.num_steps += steps
        if self._recorder.keeps_details:
            self._recorder.steps += [(runs.total_rows, 0, gap)] * (steps - 1)
        self.busy_seconds += total
        return True

    def _is_linear(self, first: float, last: float, steps: int, sent: float) -> bool:
        """Whether the step in the middle of a jump costs what the line between its first and its last step says."""
        seconds = self._decode_cost(steps // 2).seconds + sent
        return abs(first + (last - first) * (steps // 2) / (steps - 1) - seconds) <= BENT * first

    # -- faults

    def restart(self, moment: float, seconds: float) -> list[Running]:
        """Restarts all ranks, with empty caches. Returns the lost requests, not those that wait for a restart."""
        if moment < self._back_at:
            self._back_at = self.now = moment + seconds
            return []
        lost = [running for group in self.groups for running in group.running.values()]
        self.groups = [self._new_group(i) for i in range(self.spec.num_groups)]
        self._runs, self._num_live = Runs(self.spec.num_groups), 0
        for groups in (self._awake, self._held, self.lost):
            groups.clear()
        self._turns.begin(self.groups, self.lost)
        self._changed = set(range(len(self.groups)))
        self._flight = None
        self._back_at = self.now = max(self.now, moment) + seconds
        return lost

    def lose(self, index: int, moment: float, seconds: float) -> list[tuple[Running, str, list[int]]]:
        """Loses a group; the other groups repeat their step after a pause. Returns its requests, with the tokens that
        their clients have."""
        group = self.groups[index]
        if index in self._runs.members:
            self._leave_run(index)
        self._awake.discard(index)
        self._held.discard(index)
        self._num_live -= len(group.running)
        table = group.scheduler.table
        moved = [(running, rid, table.live[rid].output_ids) for rid, running in group.running.items()]
        self.groups[index] = self._new_group(index)
        self._changed.add(index)
        self.lost.add(index)
        self._turns.begin(self.groups, self.lost)
        if self._flight is not None:
            self._flight.pending.discard(index)
            self._flight.end = max(self._flight.end, moment) + seconds
        else:
            self.now = max(self.now, moment) + seconds
        return moved
