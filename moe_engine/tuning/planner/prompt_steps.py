"""Prompts of a closed loop in this engine's scheduler: the wait for the first token, and what answers lose to prompts.

All waiting prompts share the next step that is planned, as far as the chunk has room, before any request decodes. The
step after the one in flight is planned already when a request arrives. With attention DP prompts of several groups are
computed in a common step, for which they wait (`PrefillTurns`), and the other groups decode in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_engine.core.dp_sync import PATIENCE
from moe_engine.tuning.costs.step_cost import StepCost, StepCostModel, StepShape

SAMPLED = 32
"""Chunks of a prompt whose time is computed; further ones are interpolated."""

ALONE = StepShape(0, 0, 0, 0, 0, 0)
"""No decodes."""

RESIDUAL = 0.5
"""Share of the running step that is left when a request arrives in it at any moment."""


@dataclass(frozen=True)
class PromptSteps:
    """Steps of prompts of equal length.

    Attributes:
        computed: tokens of a prompt. before: cached tokens before them. chunk: tokens of a step of a group.
        decode: decodes in the steps of the prompts, and their seconds alone; None: prompts have steps of their own.
    """

    cost: StepCostModel
    computed: float
    before: float
    chunk: int
    decode: tuple[StepShape, float] | None = None

    def added(self, prompts: float, groups: float = 1.0) -> float:
        """Seconds that prompts add to the decodes of their steps; also of parts of a prompt, for mean numbers.

        Args:
            prompts: of each of `groups` attention groups, in the same steps.
        """
        alone = 0.0 if self.decode is None else self.decode[1]
        return self._sum(prompts, groups, lambda step: step.seconds - alone)

    def first_tokens(self, prompts: float, groups: float = 1.0) -> float:
        """Mean seconds until their first tokens: a step has the prompts for which its chunk has room."""
        together = max(1.0, min(prompts, self.chunk / max(1.0, self.computed)))
        return self._sum((prompts + together) / 2, groups, lambda step: step.seconds)

    def resources(self) -> dict[str, float]:
        """Seconds of the steps of one prompt by resource, with the decodes in them."""
        parts: dict[str, float] = {}

        def add(step: StepCost) -> float:
            for name, value in step.by_resource.items():
                parts[name] = parts.get(name, 0.0) + value
            return 0.0

        self._sum(1.0, 1.0, add)
        return parts

    def _sum(self, prompts: float, groups: float, value: Callable[[StepCost], float]) -> float:
        if not self.computed or prompts <= 0:
            return 0.0
        if self.computed > self.chunk:
            return prompts * self._chunks(groups, value)
        most, seconds = self.chunk / self.computed, 0.0
        full = math.floor(prompts / most)
        if full:
            seconds = full * value(self._step(most * self.computed, self.before, most, groups))
        left = prompts - full * most
        return seconds + (value(self._step(left * self.computed, self.before, left, groups)) if left > 1e-9 else 0.0)

    def _chunks(self, groups: float, value: Callable[[StepCost], float]) -> float:
        """Seconds of one prompt that is longer than a chunk; of many chunks the mean of `SAMPLED` in equal distances,
        because a chunk's time grows almost linearly with the tokens before it."""
        left, before, seconds = round(self.computed), self.before, 0.0
        whole = left // self.chunk
        if whole > SAMPLED:
            for place in range(SAMPLED):
                at = before + self.chunk * (whole * (place + 0.5) / SAMPLED - 0.5)
                seconds += value(self._step(self.chunk, at, 1.0, groups)) * whole / SAMPLED
            left, before = left - whole * self.chunk, before + whole * self.chunk
        while left > 0:
            tokens = min(left, self.chunk)
            seconds += value(self._step(tokens, before, 1.0, groups))
            left, before = left - tokens, before + tokens
        return seconds

    def _step(self, tokens: float, before: float, prompts: float, groups: float) -> StepCost:
        count, prompts = max(1, round(tokens)), max(1.0, prompts)
        each = tokens / prompts
        pairs = round(tokens * before + tokens * (each + 1) / 2)
        beside = ALONE if self.decode is None else self.decode[0]
        rows, context = beside.decode_rows, beside.decode_context
        everyone = beside.global_tokens + round(count * groups)
        cached, fresh = round(before * prompts), count if before < each else 0
        return self.cost.step(
            StepShape(rows, context, beside.drafts, count, pairs, everyone, beside.expert_skew, cached, fresh)
        )


@dataclass(frozen=True)
class Waiting:
    """Seconds until the first token, and seconds that other prompts add to an answer."""

    first_token: float
    others: float


@dataclass(frozen=True)
class Others:
    """The other requests of a closed loop.

    Attributes:
        count: of the whole loop. groups: attention groups.
        num_steps: decode steps of an answer. decode_s: seconds of a decode step.
        beside_s: seconds that a request adds to the steps that run meanwhile.
        outside_s: time of a request outside the steps. Without it the next request of a client arrives when a step
            ends, else at any moment of a step.
    """

    count: float
    groups: int
    num_steps: float
    decode_s: float
    beside_s: float
    outside_s: float

    @property
    def arrivals(self) -> float:
        """In a decode step."""
        return self.count / max(1.0, self.num_steps)

    def until_planned(self, in_flight_s: float) -> float:
        """Seconds of the planned step, and of the rest of the running one."""
        return in_flight_s * (1 + RESIDUAL * min(1.0, self.outside_s / self.decode_s))


def of_equal_requests(steps: PromptSteps, others: Others) -> Waiting:
    """Requests of the same lengths stay in step: all end together, and all their prompts are computed then. The first
    ones wait with their second token for the last one."""
    all_requests = 1 + others.count
    groups = min(others.groups, all_requests)
    each = all_requests / groups
    first = steps.first_tokens(each, groups) + others.beside_s * (1 + all_requests) / 2
    return Waiting(first, steps.added(each, groups) + others.beside_s * all_requests - first)


def of_parted_requests(steps: PromptSteps, others: Others) -> Waiting:
    """Requests of the same lengths whose prompts need several steps, all with decodes: those of a step end together,
    and the other steps fall into their answers. More steps than an answer has wait for each other."""
    all_requests = 1 + others.count
    each = max(1.0, min(all_requests, steps.chunk / steps.computed))
    added = steps.added(each) + each * others.beside_s
    num_steps = all_requests / each
    most = others.num_steps / max(1.0, steps.computed / steps.chunk)
    meanwhile = min(num_steps - 1, most)
    queue = (num_steps - 1 - meanwhile) * added
    share = min(1.0, (num_steps - 1) / max(1.0, most))
    planned = others.until_planned(others.decode_s + share * added)
    return Waiting(planned + queue + steps.first_tokens(each) + each * others.beside_s, meanwhile * added)


def of_varied_requests(steps: PromptSteps, others: Others) -> Waiting:
    """Requests of different lengths end at any time."""
    if others.count <= 0:
        return Waiting(steps.first_tokens(1.0), 0.0)
    if others.groups > 1:
        return _of_groups(steps, others)
    arrivals = others.arrivals
    busy = -math.expm1(-arrivals)
    batch = arrivals / busy
    added = steps.added(batch) + batch * others.beside_s
    planned = (1 - busy) * others.decode_s + busy * added
    first = steps.first_tokens(1 + arrivals) + (1 + arrivals) * others.beside_s
    return Waiting(others.until_planned(planned) + first, others.count * added / batch)


def _of_groups(steps: PromptSteps, others: Others) -> Waiting:
    """Prompts wait until half of the groups have one, and for `PATIENCE` steps at most."""
    arrivals = others.arrivals
    held = min(PATIENCE, 1 + max(0.0, others.groups / 2 - 1) / arrivals)
    batch = 1 + arrivals * held
    each = _busiest(batch, others.groups)
    together = batch / each
    added = steps.added(each, together) + batch * others.beside_s
    planned = others.decode_s + added / (held + 1 + 1 / arrivals)
    held_s = others.decode_s * (held + arrivals * held**2 / 2) / batch
    first = steps.first_tokens(each, together) + batch * others.beside_s
    # a group with a prompt does not decode in its step; decode engines compute no prompts
    paused = others.count / others.groups * others.decode_s if steps.computed else 0.0
    return Waiting(others.until_planned(planned) + held_s + first, others.count * added / batch + paused)


def _busiest(prompts: float, groups: int) -> float:
    """Prompts of the group with the most of them, if their groups are random."""
    mean = prompts / groups
    return min(max(1.0, mean + math.sqrt(2 * mean * math.log(groups))), prompts)
