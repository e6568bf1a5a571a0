"""Simulates the requests that `moe-engine calibrate` sent beside each other, and corrects the cost file by the result.

`answer_seconds` is measured with lone requests, whose way to the scheduler takes longer than under load: processes have
to be woken up, and the core receives and plans a request between two steps, which `arrival_seconds` contains already.
The difference belongs to `idle_seconds`. Its size is that with which simulated first tokens come as soon as measured
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, compress

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.mixed_probe import Effects, Part
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed
from moe_engine.tuning.stats import mean

TURNS = 4
"""A correction also moves when requests meet that find the engine idle, so one turn does not suffice."""


def corrected(
    file: CostFile, parts: Sequence[Part], effects: Effects, scheduler: SchedulerConfig, num_groups: int = 1
) -> CostFile:
    """The file with another `answer_seconds`, and with an `idle_seconds` that leaves the answers of lone requests as
    measured. The work of the frontend for a request and a token is its least answer, that of a lone request after a
    pause the longest one: beside others a request waits no longer outside the steps. Requests that find the engine idle
    are left out: the corrections of both times cancel there.

    Args:
        effects: of these parts, whose steps are simulated with their slowness.
        num_groups: schedulers that step together.
    """
    beside = [_beside_others(part) for part in parts]
    least, most, found = file.request_seconds + file.token_seconds, file.answer_seconds + file.idle_seconds, file
    for _ in range(TURNS if any(map(any, beside)) else 0):
        late = middle_mean(
            [
                simulated.ttft - measured
                for part, slowness, chosen in zip(parts, zip(effects.decode, effects.prefill), beside)
                for simulated, measured in compress(
                    zip(replay(_slower(found, *slowness), part, scheduler, num_groups), part.ttfts), chosen
                )
            ]
        )
        answer = min(max(found.answer_seconds - late, min(least, file.answer_seconds)), most)
        idle = max(file.idle_seconds + file.answer_seconds - answer, 0.0)
        found = replace(found, answer_seconds=answer, idle_seconds=idle)
    return found


def _slower(file: CostFile, decode: float, prefill: float) -> CostFile:
    """With steps that take these times as long; 0: unknown, as measured."""
    slower = file.slower(Curve((1.0,), (decode or 1.0,)), prefill or 1.0)
    return replace(slower, idle_seconds=file.idle_seconds)


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the middle half."""
    quarter = len(values) // 4
    return mean(sorted(values)[quarter : len(values) - quarter])


def _beside_others(part: Part) -> list[bool]:
    """Of each request, whether the answer to an earlier one had not ended when it was read."""
    ends = accumulate(part.ends, max, initial=0.0)
    return [end > read for (_, read), end in zip(part.arrivals, ends)]


def replay(file: CostFile, part: Part, scheduler: SchedulerConfig, num_groups: int = 1) -> list[Answer]:
    """The answers to the part's requests, in order of the calls. Requests share no prefix."""
    begin = part.arrivals[0][0]
    arrivals, used = [], 0
    for (call, _), (prompt, answer) in zip(part.arrivals, part.lengths):
        arrivals.append(Arrival(call - begin, list(range(used, used + prompt)), answer))
        used += prompt
    replica = ReplicaSpec(
        scheduler,
        MeasuredCosts(file),
        num_groups,
        acceptance=file.acceptance,
        idle_seconds=file.idle_seconds,
        **file.delays,
    )
    spec = FleetSpec(
        replica,
        request_seconds=file.request_seconds,
        token_seconds=file.token_seconds,
        busy_seconds=file.busy_seconds,
    )
    fleet = Fleet(spec, Fixed(arrivals, len(arrivals)), answer_seconds=file.delivery_seconds)
    return sorted(fleet.run().recorder.answers, key=lambda answer: answer.started)
