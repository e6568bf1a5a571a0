"""A simulated machine under a depth policy: cost of steps, acceptance of drafts, ends of requests.

Steps overlap as in the engine: a step is planned before the result of the step in flight is known, so an ended request
is decoded once more in vain, and a request near its length gets no drafts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from moe_engine.scheduler.draft_depth import IN_VAIN, DepthPolicy, DraftOutcome
from moe_engine.scheduler.step_cost_model import StepCost


@dataclass(frozen=True)
class Machine:
    """Seconds of a step, in any unit: a constant and a part per token, of the target model, of a draft level and of the
    draft extend. `overhead`: of a step with drafts, `host_overhead`: the part of `base` without the model. `noise`:
    relative standard deviation of each step's time; a share `outliers` of the steps takes 20 times as long, and so does
    the `first` step of each number of requests and depth, as if it compiled a kernel.

    `rates[i]`: acceptance probability of draft i if all earlier drafts are accepted. Requests end after about
    `length` tokens.
    """

    base: float = 10.0
    token: float = 0.02
    draft: float = 0.5
    draft_token: float = 0.002
    follow: float = 0.2
    follow_token: float = 0.001
    overhead: float = 0.0
    host_overhead: float = 0.0
    noise: float = 0.02
    outliers: float = 0.0
    first: bool = False
    rates: tuple[float, ...] = (0.8, 0.7, 0.6, 0.5)
    length: int = 200
    ends_by_eos: bool = True

    def seconds(self, num_requests: int, num_drafts: int, depth: int) -> float:
        """Seconds without the draft extend."""
        return self.base + self.token * (num_requests + num_drafts) + self.draft_seconds(num_drafts, depth)

    def draft_seconds(self, num_drafts: int, depth: int) -> float:
        return depth * self.draft + num_drafts * self.draft_token

    def follow_seconds(self, num_tokens: int) -> float:
        return self.follow + self.follow_token * num_tokens

    def tokens_per_second(self, num_requests: int, depth: int | None) -> float:
        """Long-run average at a constant depth; None: without speculation."""
        if depth is None:
            return num_requests / self.seconds(num_requests, 0, 0)
        tokens, chance = 1.0, 1.0
        for rate in self.rates[:depth]:
            chance *= rate
            tokens += chance
        num_tokens = num_requests * (depth + 1)
        seconds = (
            self.seconds(num_requests, num_requests * depth, depth) + self.follow_seconds(num_tokens) + self.overhead
        )
        return num_requests * tokens / seconds

    def best_depth(self, num_requests: int) -> int:
        """The best depth; 0 if speculation has no gain."""
        speeds = [self.tokens_per_second(num_requests, depth) for depth in range(1, len(self.rates) + 1)]
        best = max(speeds)
        return 0 if best <= self.tokens_per_second(num_requests, None) else 1 + speeds.index(best)


@dataclass(eq=False)
class Running:
    left: int
    followed: bool = True
    in_flight: int = 0


@dataclass
class InFlight:
    """A step in flight: its requests, their depths, and the times to report."""

    requests: list[Running]
    depths: list[int]
    seconds: float
    draft: float
    follow: float
    model: float = 0.0
    plain: bool = True


class NoDrafts:
    """The baseline of every policy: implements `DepthPolicy`."""

    enabled = False

    def choose(self, num_requests: int, num_draftable: int) -> int:
        return 0

    def observe(self, outcomes: list[DraftOutcome], cost: StepCost | None) -> None:
        return None


@dataclass
class DepthSimulation:
    """`tokens` and `seconds` so far; `depths[i]` was chosen for step i, `enabled[i]`: whether drafting was enabled."""

    policy: DepthPolicy
    machine: Machine
    rng: random.Random
    running: list[Running] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    depths: list[int] = field(default_factory=list)
    enabled: list[bool] = field(default_factory=list)
    _in_flight: InFlight | None = None
    _shapes: set[tuple[int, int]] = field(default_factory=set)

    def run(self, num_steps: int, num_requests: int) -> DepthSimulation:
        """Runs `num_steps` steps with `num_requests` requests; an ended request is replaced. Returns itself."""
        for _ in range(num_steps):
            self._fill(num_requests)
            planned = self._plan()
            if self._in_flight is not None:
                self._finish(self._in_flight)
            self._in_flight = planned
        return self

    @property
    def _in_flight_drafts(self) -> bool:
        """True if the step in flight has drafts, so that its number of tokens is unknown."""
        return self._in_flight is not None and any(self._in_flight.depths)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def change(self, **fields: float | tuple[float, ...]) -> DepthSimulation:
        """Changes the machine or the traffic, and resets the counts. Returns itself."""
        self.machine = replace(self.machine, **fields)  # type: ignore[arg-type]
        self.tokens, self.seconds = 0, 0.0
        self.depths, self.enabled = [], []
        return self

    def _fill(self, num_requests: int) -> None:
        del self.running[num_requests:]
        while len(self.running) < num_requests:
            length = self.machine.length
            self.running.append(Running(max(1, round(length * self.rng.uniform(0.5, 1.5)))))

    def _plan(self) -> InFlight:
        policy, machine = self.policy, self.machine
        by_length = 0 if machine.ends_by_eos else 1  # an end by length is known ahead
        requests = [r for r in self.running if not by_length or r.left > r.in_flight]
        if not requests:
            return InFlight([], [], 0.0, 0.0, 0.0)
        depth = policy.choose(len(requests), sum(r.followed for r in requests))
        depths = [depth if r.followed and (not by_length or r.left - r.in_flight > 1) else 0 for r in requests]
        follows = policy.enabled and any(r.followed for r in requests)
        plain = not follows and not self._in_flight_drafts
        for request in requests:
            request.followed &= follows
            request.in_flight += 1
        noise = max(0.5, self.rng.gauss(1.0, machine.noise))
        if self.rng.random() < machine.outliers or (machine.first and (len(requests), depth) not in self._shapes):
            noise *= 20
        self._shapes.add((len(requests), depth))
        num_tokens = len(requests) + sum(depths)
        follow = machine.follow_seconds(num_tokens) * noise if follows else 0.0
        overhead = 0.0 if plain else machine.overhead
        seconds = (machine.seconds(len(requests), sum(depths), max(depths)) + overhead) * noise + follow
        self.depths.append(depth)
        self.enabled.append(policy.enabled)
        draft = machine.draft_seconds(sum(depths), max(depths)) * noise
        model = 0.0 if plain else seconds - draft - follow - (machine.overhead + machine.host_overhead) * noise
        return InFlight(requests, depths, seconds, draft, follow, model, plain)

    def _finish(self, step: InFlight) -> None:
        draft_outcomes = []
        for request, depth in zip(step.requests, step.depths):
            if request.left <= 0:  # it ended while this step was in flight
                draft_outcomes += [IN_VAIN] if depth else []
                continue
            good = 0
            while good < depth and self.rng.random() < self.machine.rates[good]:
                good += 1
            kept = min(good + 1, request.left)
            request.in_flight -= 1
            request.left -= kept
            self.tokens += kept
            if depth:
                verified = depth if request.left else min(depth, kept)
                draft_outcomes.append((verified, min(good, verified), kept - 1))
        self.running = [r for r in self.running if r.left > 0]
        self.seconds += step.seconds
        if step.requests:
            drafting = sum(1 for depth in step.depths if depth)
            seconds = (step.seconds, step.draft, step.follow, step.model)
            cost = StepCost(len(step.requests), drafting, max(step.depths), *seconds, plain=step.plain)
            self.policy.observe(draft_outcomes, cost)
