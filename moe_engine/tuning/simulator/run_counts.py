"""Results of a step: tokens of requests, and for groups in runs times of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_engine.scheduler.chunk_run import ChunkTimes
from moe_engine.scheduler.events import RequestEvent
from moe_engine.tuning.costs.step_cost import StepCost
from moe_engine.tuning.simulator.front_end import FrontEnd
from moe_engine.tuning.simulator.group import Group
from moe_engine.tuning.simulator.recorder import Recorder, Running
from moe_engine.tuning.simulator.runs import NEVER, Runs
from moe_engine.types import Request


@dataclass
class Flight:
    """The step that runs.

    Attributes:
        pending: groups that have not received its result, except those in a run.
        rows: decoding requests of all groups. tokens: their prompt tokens.
        began: when it began to run. `end` is later by its seconds and by the delays of arrivals and ends.
        hold: it has no prompts. chunks: groups in a run that compute a chunk in it.
        sampled: of those groups, prompts whose last chunk is in it too.
        is_graph: a recorded step replays.
        launched: time of planning; `relaunched`: by groups behind `drained`, the first one that needed a result first.
    """

    cost: StepCost
    end: float
    pending: set[int]
    rows: int = 0
    tokens: int = 0
    began: float = 0.0
    hold: bool = False
    chunks: set[int] = field(default_factory=set)
    is_graph: bool = False
    launched: float = 0.0
    relaunched: float = 0.0
    drained: int = NEVER
    sampled: dict[int, list[Request]] = field(default_factory=dict)

    def launched_by(self, group: int) -> float:
        """Time at which a group planned it."""
        return self.relaunched if group > self.drained else self.launched


class RunCounts:
    """Attributes:
    held_at: end of the newest step without prompts, in which all requests in runs got a token.
    """

    def __init__(self, recorder: Recorder, front: FrontEnd | None, exact: bool) -> None:
        self._recorder, self._front = recorder, front
        self._takes_decodes = front is None and not exact
        self.held_at = 0.0

    def count(self, runs: Runs, groups: Sequence[Group], flight: Flight, previous: float, now: float) -> None:
        """Counts a token of each request in a run that decodes in this step, and the chunks.

        Before the first step of a run, the times of the last tokens differ. Requests in the steps of a prompt got their
        last token in the newest step without prompts.

        Args:
            previous: end of the step before.
        """
        gap, rows = now - previous, runs.total_rows - runs.rows_ahead
        before = runs.sums.mark()
        runs.sums.add(gap)
        if flight.chunks:
            times = ChunkTimes(flight.launched, previous, now, before, runs.sums.mark())
            rows -= self._count_chunks(groups, flight, times)
        if self._front is not None and rows:
            self._front.tokens(now, rows)
        if flight.hold and runs.chunking and self.held_at != previous:
            late = sum([groups[index].run_rows for index in runs.chunking if index not in runs.fresh])
            self.add(now - self.held_at, late, now)
            rows -= late
        for index in [index for index in runs.fresh if index not in flight.chunks]:
            group = groups[index]
            rows -= group.run_rows
            self._add_further([group.running[request.rid] for request in group.scheduler.table.decodes], now)
            if flight.hold or index not in runs.chunking:
                runs.fresh.remove(index)
        if flight.hold:
            self.held_at = now
        runs.step += 1
        self.add(gap, rows, now)

    def _count_chunks(self, groups: Sequence[Group], flight: Flight, times: ChunkTimes) -> int:
        """Returns the number of requests that wait for these chunks."""
        late = replace(times, launched=flight.relaunched) if flight.drained < NEVER else times
        rows = 0
        for index in flight.chunks:
            group = groups[index]
            rows += group.run_rows
            group.run_from += 1
            group.chunk_times.append(late if index > flight.drained else times)
        return rows

    def finish(self, group: Group, flight: Flight, now: float) -> list[RequestEvent]:
        """Gives a group the result of its step. Counts the events that are one further token of a request, without a
        frontend. Returns the others."""
        taken = group.take_decode(now) if self._takes_decodes else None
        if taken is not None:
            self._add_further(taken, now)
            return []
        events = group.finish(flight.cost, flight.is_graph)
        if self._front is not None:
            return events
        further, others = list[Running](), list[RequestEvent]()
        for event in events:
            running = group.running[event.rid]
            if event.finish_reason is None and running.first and len(event.token_ids) == 1 and not running.uncomputed:
                further.append(running)
            else:
                others.append(event)
        self._add_further(further, now)
        group.load_tokens += len(further)
        return others

    def _add_further(self, further: list[Running], now: float) -> None:
        """Each of these requests, which have a token, gets another one."""
        counts = dict[float, int]()
        for running in further:
            last, running.last = running.last, now
            counts[last] = counts.get(last, 0) + 1
        for last, count in counts.items():
            self.add(now - last, count, now)

    def add(self, gap: float, rows: int, now: float) -> None:
        """`rows` requests get a token, `gap` seconds after the last one."""
        if rows:
            self._recorder.gaps.add(gap, rows)
            self._recorder.gaps.add_tokens(now, rows)
