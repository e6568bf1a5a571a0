"""What concurrent requests cost each other: a measurement of `moe-engine calibrate`.

The other measurements have one kind of step at a time. Under load a step also loses time to requests that arrive and
end meanwhile: to their work in the frontend and the client, where these share cores with the steps, and to planning.
The server records its steps (`--record-step-times`). A regression over them separates four factors: the slowness of
decodes and that of prompts in this part of the measurement, and the seconds of an arrival and of an end. The
slowness is measured by the steps in which no request arrives or ends, so a clock that drifts changes the seconds by no
more than it drifts within a part. It is that of the machine, which the rounds measure, times that of steps under load:
schedulers that step together wait for each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_engine.tuning.costs.measured import Curve
from moe_engine.tuning.costs.step_cost import StepCostModel, StepShape
from moe_engine.tuning.stats import mean, median

PROMPT, ANSWER = (0.25, 1.75), (0.25, 1.75)
"""Least and most tokens, as shares of `MEAN_PROMPT` and `MEAN_ANSWER`."""
MEAN_PROMPT, MEAN_ANSWER = 64, 32
BESIDE = 8
"""Requests that decode together, for the estimate of the server's rate."""
LOADS = 1.0, 1.6
"""Rates of the requests as shares of the estimate: several prompts share a step, and many requests decode together."""
ALIKE = Curve((1.0,), (1.0,))
"""Decodes that take as long under load as measured alone."""
SECONDS, MOST_SECONDS = 2.0, 10.0
LEAST, MOST = 8, 200
"""Requests of a part, of a server that answers as many within `MOST_SECONDS`."""
BEYOND, BEYOND_EVENTS, SWEEPS = 2.5, 3.2, 12
"""Huber's regression: residuals beyond this number of standard deviations count less: of steps without
and with arrivals or ends; iterations."""
EVENTS = 2
"""Columns of the regression that all parts share: arrivals, ends."""
LEAST_STEPS = 8
"""Recorded steps of a part that can be used."""
Step = Sequence[float]
"""Requests that decode, prompt tokens, prompts, their cached tokens, Unix time of the end, seconds."""
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Part:
    """Requests that were sent concurrently, in order of the calls, and the steps meanwhile. Unix times.

    Attributes:
        arrivals: of each request, the client's call, and when the frontend had read it.
        ends: when the client had the last token.
        load: one of `LOADS`.
        round: of the measurement.
        machine: slowness of the machine meanwhile.
    """

    steps: Sequence[Step]
    arrivals: Sequence[tuple[float, float]]
    ends: Sequence[float]
    load: float = 0.0
    round: int = 0
    machine: float = 1.0

    @property
    def rows(self) -> float:
        """Mean requests of the steps that decode."""
        return max(mean([step[0] for step in self.steps if step[0]]), 1.0)


@dataclass(frozen=True)
class Effects:
    """Seconds that an arrival and an end add to the steps that run meanwhile; for each part, the slowness of steps that
    decode and of steps with prompts, against their costs. 0: unknown. `spread`: relative standard deviation of a step
    from what it takes by all this."""

    arrival: float
    end: float
    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    spread: float = 0.0

    def of(self, places: Sequence[int]) -> Effects:
        """In some of the parts."""
        decode, prefill = (tuple(values[place] for place in places) for values in (self.decode, self.prefill))
        return replace(self, decode=decode, prefill=prefill)

    def slowness(self, of_machine: Sequence[float]) -> tuple[float, float]:
        """How much longer decodes and prompts take under load than as measured alone.

        Args:
            of_machine: for each part, the slowness of the machine in it.
        """
        decode, prefill = (
            [found / machine for found, machine in zip(values, of_machine) if found]
            for values in (self.decode, self.prefill)
        )
        return median(decode) if decode else 1.0, median(prefill) if prefill else 1.0


def request_lengths(rng: random.Random, most_prompt: int) -> tuple[int, int]:
    """Random tokens of a prompt and an answer."""
    prompt = round(MEAN_PROMPT * rng.uniform(*PROMPT))
    return max(min(prompt, most_prompt), 1), max(round(MEAN_ANSWER * rng.uniform(*ANSWER)), 2)


def rate_of(
    costs: StepCostModel, drafts: int, tokens_a_step: float = 1.0, groups: int = 1, most_rows: int = BESIDE
) -> float:
    """Requests a second of a load of 1.

    Args:
        tokens_a_step: of a request that decodes.
        groups: schedulers that step together.
        most_rows: requests that a scheduler decodes together at most.
    """
    rows = min(BESIDE, most_rows)
    decode = costs.step(StepShape(rows, rows * MEAN_PROMPT, drafts, 0, 0, rows)).seconds
    prefill = costs.step(StepShape(0, 0, 0, MEAN_PROMPT, pairs_of(MEAN_PROMPT, 1), MEAN_PROMPT)).seconds
    return groups / (prefill + MEAN_ANSWER / tokens_a_step * decode / rows)


def pairs_of(tokens: int, prompts: int) -> int:
    """Pairs of a token with those before it, of prompts of equal length."""
    return tokens * (tokens // max(prompts, 1) + 1) // 2


def slowness_by_rows(parts: Sequence[Part], effects: Effects) -> Curve:
    """How much longer decodes take under load than as measured alone, over the requests that decode together: the
    median of the parts of each load, at their mean number of requests."""
    found: list[tuple[float, float]] = []
    for load in LOADS:
        places = [place for place, part in enumerate(parts) if part.load == load]
        if places:
            slowness = effects.of(places).slowness([parts[place].machine for place in places])[0]
            found.append((mean([parts[place].rows for place in places]), slowness))
    if len(found) > 1 and found[-1][0] <= found[0][0]:
        found.pop()
    counts, factors = zip(*found)
    return Curve(counts, factors)


async def run(
    ask: Callable[[int, int], Awaitable[Reply]], rate: float, most_prompt: int, rng: random.Random
) -> list[Reply]:
    """Sends requests at Poisson times, and waits for all answers.

    Args:
        ask: sends a request with a prompt and an answer of these lengths, and waits for its end.
    """
    count = min(max(round(rate * SECONDS), LEAST), MOST, max(round(rate * MOST_SECONDS), 4))
    due, tasks = time.perf_counter(), []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(ask(*request_lengths(rng, most_prompt))))
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
    return list(await asyncio.gather(*tasks))


def effects(
    parts: Sequence[Part], costs: StepCostModel, drafts: int, num_groups: int = 1, sent_seconds: float = 0.0
) -> Effects | None:
    """The regression over all parts; None: too few steps, or none in which a request arrived.

    Args:
        num_groups: schedulers that step together.
        sent_seconds: as in `CostFile`; known, so no variable.
    """
    parts = [part for part in parts if len(part.steps) >= LEAST_STEPS]
    if not parts:
        return None
    costs_of = _costs_of if num_groups == 1 else _joint_costs_of
    alone = [costs_of(part.steps, costs, drafts) for part in parts]
    # columns: decode seconds of each part, prefill seconds of each part, arrivals, ends
    height, width = sum(map(len, alone)), 2 * len(parts) + EVENTS
    matrix = np.zeros((height, width))
    taken = np.concatenate([_without_sending(part.steps, sent_seconds * num_groups) for part in parts])
    begin = 0
    for number, (part, seconds) in enumerate(zip(parts, alone)):
        rows = slice(begin, begin + len(seconds))
        matrix[rows, 2 * number : 2 * number + 2] = seconds
        matrix[rows, -2] = _shares(part.steps, part.arrivals)
        matrix[rows, -1] = _shares(part.steps, [(end, end) for end in part.ends])
        begin = rows.stop
    if not matrix[:, -2].any():
        return None
    part_of = np.repeat(np.arange(len(parts)), [len(seconds) for seconds in alone])
    found = _robust(matrix, taken, part_of)
    decode, prefill = found[:-EVENTS:2], found[1:-EVENTS:2]
    spread = spread_of_steps(taken, matrix @ np.array(found), part_of)
    return Effects(found[-2], found[-1], tuple(decode), tuple(prefill), spread)


def _joint_costs_of(steps: Sequence[Step], costs: StepCostModel, drafts: int) -> npt.NDArray[np.float64]:
    """As `_costs_of` for steps of several schedulers: some decode while others compute prompts, and the slower ones
    determine the step."""
    found = np.zeros((len(steps), 2))
    for place, (decodes, tokens, prompts, *_) in enumerate(steps):
        for column, shape in enumerate((_shape(decodes, 0, 0, drafts), _shape(0, tokens, prompts, drafts))):
            if shape.global_tokens:
                found[place, column] = costs.step(shape).seconds
        found[place, found[place].argmin()] = 0
    return found


def _shape(decodes: float, tokens: float, prompts: float, drafts: int) -> StepShape:
    """Shape of a recorded step with answers of mean length."""
    rows, new = int(decodes), int(tokens)
    context = rows * (MEAN_PROMPT + MEAN_ANSWER // 2)
    return StepShape(rows, context, drafts if rows else 0, new, pairs_of(new, int(prompts)), rows + new)


def _costs_of(steps: Sequence[Step], costs: StepCostModel, drafts: int) -> npt.NDArray[np.float64]:
    """Costs of each step as measured alone: seconds of its decodes, and of its prompts in addition."""
    found = np.zeros((len(steps), 2))
    for place, (rows, tokens, prompts, *_) in enumerate(steps):
        whole = costs.step(_shape(rows, tokens, prompts, drafts))
        decode = min(whole.by_resource.get("decode", 0.0), whole.seconds) if rows else 0.0
        found[place] = decode, whole.seconds - decode
    return found


def _without_sending(steps: Sequence[Step], sent_seconds: float) -> npt.NDArray[np.float64]:
    """Seconds of each step without those in which the tokens of the step before were sent."""
    seconds, ends, rows = (np.array([step[place] for step in steps]) for place in (-1, -2, 0))
    follows = ends[1:] - seconds[1:] - ends[:-1] < seconds[1:]
    seconds[1:] -= np.minimum(sent_seconds * rows[:-1] * follows, seconds[1:] / 2)
    return seconds


def _shares(steps: Sequence[Step], spans: Sequence[tuple[float, float]]) -> npt.NDArray[np.float64]:
    """For each step, how many of the time spans lie in it; parts of a span count as such."""
    ends = np.array([step[-2] for step in steps])
    begins = ends - np.array([step[-1] for step in steps])
    found = np.zeros(len(steps))
    for begin, end in spans:
        first, last = (int(np.searchsorted(ends, moment)) for moment in (begin, end))
        for place in range(first, min(last + 1, len(steps))):
            if end > begin:
                found[place] += max(min(end, ends[place]) - max(begin, begins[place]), 0.0) / (end - begin)
            else:
                found[place] += begins[place] <= begin
    return found


def _spreads(
    residuals: npt.NDArray[np.float64], part_of: npt.NDArray[np.int64], calm: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Median residual of the steps of each part without arrivals or ends; none is far below the others."""
    whole = max(float(np.median(residuals)), 1e-9)
    chosen = [residuals[calm & (part_of == part)] for part in range(int(part_of.max()) + 1)]
    found = np.array([float(np.median(values)) if len(values) >= LEAST_STEPS else whole for values in chosen])
    return np.maximum(found, float(np.median(found)) / 2 + 1e-12)


def spread_of_steps(
    taken: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], part_of: npt.NDArray[np.int64]
) -> float:
    """Relative standard deviation of a step from what is expected, by sums of two steps of a part: one that ends late,
    because its result is read late, makes the next one shorter. Robust; long steps count more."""
    same = part_of[1:] == part_of[:-1]
    if not same.any():
        return 0.0
    beyond = taken - expected
    relative = ((beyond[1:] + beyond[:-1]) / np.maximum(np.hypot(expected[1:], expected[:-1]), 1e-9))[same]
    weights = (expected[1:] + expected[:-1])[same]
    return 1.4826 * _weighted_median(np.abs(relative - _weighted_median(relative, weights)), weights)


def _weighted_median(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def _robust(
    matrix: npt.NDArray[np.float64], taken: npt.NDArray[np.float64], part_of: npt.NDArray[np.int64]
) -> list[float]:
    """Huber's regression on relative errors, with no coefficient below 0. Parts count by their precision: one next to
    other programs varies more, and its delays are not those by arrivals.

    Steps with and without arrivals or ends have scales of their own: the delays by arrivals vary much, and a common
    scale would leave out the long ones, which count.
    """
    scale = np.maximum(matrix[:, :-EVENTS].sum(axis=1), 1e-9)
    left, right = matrix / scale[:, None], taken / scale
    eventful: npt.NDArray[np.bool_] = np.asarray(matrix[:, -2:].any(axis=1))
    columns = [place for place in range(matrix.shape[1]) if matrix[:, place].any()]
    weights = np.ones(len(taken))
    while True:
        for _ in range(SWEEPS):
            root = np.sqrt(weights)
            found = np.linalg.lstsq(left[:, columns] * root[:, None], right * root, rcond=None)[0]
            residuals = np.abs(right - left[:, columns] @ found)
            spread = _spreads(residuals, part_of, ~eventful)
            residuals /= spread[part_of]
            weights = (spread.min() / spread[part_of]) ** 2
            for chosen, beyond in ((eventful, BEYOND_EVENTS), (~eventful, BEYOND)):
                if chosen.any():
                    limit = max(beyond * 1.4826 * float(np.median(residuals[chosen])), 1e-9)
                    weights[chosen] *= np.minimum(limit / np.maximum(residuals[chosen], 1e-12), 1.0)
        negative = [column for column, value in zip(columns, found) if value < 0]
        if not negative:
            break
        columns = [column for column in columns if column not in negative]
    whole = [0.0] * matrix.shape[1]
    for column, value in zip(columns, found):
        whole[column] = float(value)
    return whole
