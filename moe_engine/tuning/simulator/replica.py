"""One engine of a simulation: its schedulers step together, on a simulated clock.

The order of things is that of `moe_engine.core.loop`: the next step is planned while the step before it runs, then the
result of that step is applied. With attention DP the groups step in lockstep, and prompts wait for their turn. Empty
steps, by which idle groups join others, change no scheduler and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_engine.core.dp_sync import PrefillTurns
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.scheduler import NEEDS_RESULT
from moe_engine.tuning.costs.step_cost import StepCost, StepCostModel, StepShape
from moe_engine.tuning.simulator.group import Group, shape_of
from moe_engine.tuning.simulator.recorder import Recorder, Running
from moe_engine.types import StepPlan

MAX_JUMP = 16
"""Steps without any event that are taken at once."""
SLOWER = 1.01
"""Bound on the growth of a step's cost over such a jump."""
EndedHandler = Callable[["Replica", int, Running, float], None]


@dataclass(frozen=True)
class ReplicaSpec:
    """A replica: the limits of its schedulers, the number of attention groups, the cost of its steps.

    `acceptance`: chance that a draft at each position is accepted if those before it were. `exact`: the scheduler plans
    every step, also where nothing can change. `arrival_seconds`: delay of the step that runs when a request arrives,
    where the front end shares its cores.
    """

    scheduler: SchedulerConfig
    costs: StepCostModel
    num_groups: int = 1
    overlap: bool = True
    acceptance: tuple[float, ...] = ()
    expert_skew: float = 1.0
    exact: bool = False
    arrival_seconds: float = 0.0


@dataclass
class _Flight:
    """The step that runs. `pending`: groups that have not got its result."""

    cost: StepCost
    end: float
    pending: set[int]


class Replica:
    """Attributes:
    now: simulated clock of its core, in seconds.
    """

    def __init__(self, spec: ReplicaSpec, recorder: Recorder, ended: EndedHandler, seed: int = 0) -> None:
        self.spec, self.now = spec, 0.0
        self._recorder, self._ended, self._seed = recorder, ended, seed
        self.groups = [self._new_group(i) for i in range(spec.num_groups)]
        self.lost: set[int] = set()
        self._turns = PrefillTurns()
        self._flight: _Flight | None = None
        self._collected = 0.0
        """When the newest result was applied."""
        self.num_steps = 0
        self.busy_seconds = 0.0

    def _new_group(self, index: int) -> Group:
        return Group(self.spec.scheduler, lambda: self.now, self.spec.acceptance, self._seed * 1009 + index)

    @property
    def is_active(self) -> bool:
        """Whether there is a step in flight or a request."""
        return self._flight is not None or any(group.running for group in self.groups)

    def add(self, group: int, running: Running, rid: str, output_ids: list[int] | None = None) -> str | None:
        """Gives a request to a scheduler. Returns why it is refused, or None."""
        if not self.is_active:
            self.now = max(self.now, running.arrival.seconds)
        self._leave_run(self.groups[group])
        if self._flight is not None:
            self._flight.end += self.spec.arrival_seconds
        running.group = group
        return self.groups[group].add(running, rid, output_ids or [])

    # -- steps

    def step(self, until: float) -> None:
        """Plans a step and applies the result of the one before; several steps if nothing happens in them before
        `until`."""
        if not self.spec.exact and self._jump(until):
            return
        hold = len(self.groups) > 1 and not self._turns.open
        shapes: dict[int, StepShape] = {}
        prefilled = False
        for index, group in enumerate(self.groups):
            if group.run_limit > group.run_steps and (hold or not group.run_holds):
                shapes[index] = group.run_shape()
                continue
            self._leave_run(group)
            plan = group.plan(hold) if group.running or group.scheduler.num_in_flight else None
            while plan is NEEDS_RESULT:
                self._apply(index)
                plan = group.plan(hold)
            if isinstance(plan, StepPlan):
                shapes[index] = shape_of(plan)
                prefilled |= plan.num_decodes < len(plan.rows)
        if not shapes:
            if self._flight is None and not hold:
                raise RuntimeError("the scheduler has requests and plans no step")
            self._take_turns(False)
            self._collect(None)
            return
        if len(self.groups) > 1:
            self._take_turns(prefilled)
        self._collect(self._launch(shapes))

    def _take_turns(self, prefilled: bool, steps: int = 1) -> None:
        waiting = decoding = 0
        for group in self.groups:
            waiting += group.scheduler.num_waiting > 0
            decoding += len(group.scheduler.table.decodes) > 0
        for _ in range(steps):
            self._turns.after_counts(len(self.groups) - len(self.lost), waiting, prefilled, decoding > 0)

    def _launch(self, shapes: dict[int, StepShape]) -> _Flight:
        cost = self.spec.costs.step(self._busiest(list(shapes.values())))
        begin = self.now if self._flight is None else max(self.now, self._flight.end)
        self.num_steps += 1
        self.busy_seconds += cost.seconds
        return _Flight(cost, begin + cost.seconds, set(shapes))

    def _busiest(self, shapes: list[StepShape]) -> StepShape:
        """The shape that determines the step: the maximum over the groups, with the tokens of all."""
        if len(shapes) == 1:
            shape = shapes[0]
            return shape if self.spec.expert_skew == 1 else replace(shape, expert_skew=self.spec.expert_skew)
        return StepShape(
            max(shape.decode_rows for shape in shapes),
            max(shape.decode_context for shape in shapes),
            max(shape.drafts for shape in shapes),
            max(shape.prefill_tokens for shape in shapes),
            max(shape.prefill_pairs for shape in shapes),
            sum(shape.global_tokens for shape in shapes),
            self.spec.expert_skew,
            max(shape.prefill_cached for shape in shapes),
        )

    def _collect(self, behind: _Flight | None) -> None:
        """Applies the step in flight; then `behind` is in flight."""
        if self._flight is not None:
            self.now = max(self.now, self._flight.end)
            gap, self._collected = self.now - self._collected, self.now
            for index in sorted(self._flight.pending):
                group = self.groups[index]
                if group.run_limit:
                    self._count_run(group, gap, 1)
                    group.run_steps += 1
                else:
                    self._apply(index)
        self._flight = behind
        if behind is None:
            return
        if not self.spec.overlap:
            self._collect(None)
        elif not self.spec.exact:
            for group in self.groups:
                if not group.run_limit and group.running:
                    group.begin_run(len(self.groups) > 1 and not self._turns.open)

    def _apply(self, index: int) -> None:
        """Gives a group the result of the step in flight."""
        flight = self._flight
        if flight is None or index not in flight.pending:
            raise RuntimeError(f"group {index} has no step in flight")
        flight.pending.discard(index)
        self.now = max(self.now, flight.end)
        group = self.groups[index]
        for event in group.finish(flight.cost):
            self._tell(index, group, event)

    def _tell(self, index: int, group: Group, event: RequestEvent) -> None:
        running = group.running[event.rid]
        if event.token_ids:
            self._recorder.tokens(running, len(event.token_ids), self.now)
            group.load_tokens += len(event.token_ids)
        reason = event.finish_reason
        if reason is None:
            return
        group.remove(event.rid)
        if reason.type == "abort":
            self._recorder.fail(running, self.now, str(reason.message))
        else:
            self._recorder.end(running, self.now, cached_tokens=event.cached_tokens, retractions=event.retractions)
        self._ended(self, index, running, self.now)

    # -- runs of decode steps

    def _leave_run(self, group: Group) -> None:
        if group.run_limit:
            if group.run_steps:
                for request in group.scheduler.table.decodes:
                    group.running[request.rid].last = self.now
            group.end_run()

    def _count_run(self, group: Group, gap: float, steps: int) -> None:
        """Counts the tokens of a run. Before its first ones, the last tokens of its requests may differ in time."""
        if group.run_steps == 0 and steps == 1:
            for request in group.scheduler.table.decodes:
                self._recorder.tokens(group.running[request.rid], 1, self.now)
            return
        rows = group.run_rows * steps
        self._recorder.gaps.add(gap, rows)
        self._recorder.gaps.add_tokens(self.now, rows)

    def _jump(self, until: float) -> bool:
        """Takes several decode steps at once, if all groups are in a run."""
        flight = self._flight
        if flight is None or flight.end >= until:
            return False
        runs = [group for group in self.groups if group.running]
        if any(group.run_holds for group in runs):
            return False  # the turn may come with any step
        steps = min((group.run_limit - group.run_steps for group in runs), default=0)
        if steps < 2:
            return False
        if not all(index in flight.pending for index, group in enumerate(self.groups) if group.running):
            return False
        first = self.spec.costs.step(self._busiest([group.run_shape() for group in runs])).seconds
        steps = min(steps, MAX_JUMP, 1 + int(min((until - flight.end) / (SLOWER * first), MAX_JUMP)))
        if steps < 2:
            return False
        if len(self.groups) > 1:
            self._take_turns(False, steps)
        self.now = flight.end
        self._count_runs(runs, self.now - self._collected, 1)
        shapes = []
        for group in runs:
            group.run_steps += steps
            shape = group.run_shape()
            shapes.append(replace(shape, decode_context=shape.decode_context - shape.decode_rows))
        last = self.spec.costs.step(self._busiest(shapes))
        total = steps * (first + last.seconds) / 2
        begin = flight.end
        self.now = begin + total - last.seconds
        self._count_runs(runs, (self.now - begin) / (steps - 1), steps - 1)
        self._collected = self.now
        self._flight = _Flight(last, begin + total, flight.pending)
        self.num_steps += steps
        self.busy_seconds += total
        return True

    def _count_runs(self, runs: list[Group], gap: float, steps: int) -> None:
        for group in runs:
            self._count_run(group, gap, steps)

    # -- faults

    def restart(self, moment: float, seconds: float) -> list[Running]:
        """All ranks start anew, with empty caches. Returns the requests that are lost."""
        lost = [running for group in self.groups for running in group.running.values()]
        self.groups = [self._new_group(i) for i in range(self.spec.num_groups)]
        self.lost.clear()
        self._flight = None
        self.now = max(self.now, moment) + seconds
        return lost

    def lose(self, index: int, moment: float, seconds: float) -> list[tuple[Running, str, list[int]]]:
        """A group is lost; the others repeat their step after a pause. Returns its requests, with the tokens that their
        clients have."""
        group = self.groups[index]
        self._leave_run(group)
        table = group.scheduler.table
        moved = [(running, rid, table.live[rid].output_ids) for rid, running in group.running.items()]
        self.groups[index] = self._new_group(index)
        self.lost.add(index)
        if self._flight is not None:
            self._flight.pending.discard(index)
            self._flight.end = max(self._flight.end, moment) + seconds
        else:
            self.now = max(self.now, moment) + seconds
        return moved
