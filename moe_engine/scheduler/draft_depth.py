"""How deep to draft, so that speculation never loses: the depth with the most expected tokens a second.

Two things are measured while serving. The share of drafts accepted at each position gives the tokens that a step of
depth d is expected to bring, 1 + a1 + a1 a2 + ...; the time of steps, by depth and by number of requests (in powers of
two: what a token more costs depends on how full the step is), gives their price. Depths that were never tried are
priced between those that were. Now and then the runner-up is tried again, so that the prices stay true.

Where nothing beats depth 0, drafting sleeps: the drafter no longer follows and costs nothing. It is woken after a while
(twice as long each time in vain) or when fewer requests run than when it fell asleep, and then drafts for requests
that are new.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from moe_engine.types import SpeculationConfig


class DepthPolicy(Protocol):
    """Chooses the depth of each step and learns from what came of it."""

    @property
    def following(self) -> bool:
        """Whether the drafter should take in what the next step computes."""

    def choose(self, num_requests: int, num_draftable: int) -> int:
        """Depth for a step of `num_requests` decodes, of which `num_draftable` can get drafts."""

    def observe(
        self, num_requests: int, depth: int, accepted: list[tuple[int, int]], seconds: float, follow: float
    ) -> None:
        """A decode step of this depth took `seconds`, `follow` of them for following.

        accepted[i] of a request that drafts could be made for: (positions whose draft was judged, drafts accepted).
        `seconds` 0: unknown, or the step did other things too.
        """


class FixedDepth:
    """Always the same, as ``--speculative-num-steps N`` asks."""

    following = True

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, num_requests: int, num_draftable: int) -> int:
        return self._depth

    def observe(
        self, num_requests: int, depth: int, accepted: list[tuple[int, int]], seconds: float, follow: float
    ) -> None:
        return None


TRIES = 3
"""Steps of a depth that are timed before its price is believed."""
RETRY_EVERY = 128
"""Decode steps between two looks at the runner-up's price."""
MARGIN = 1.02
"""Drafting must be better than not drafting by this factor."""
PATIENCE = 8
"""Steps without a gain after which drafting sleeps."""
WORTH_WAKING = 1.3
"""Tokens that a single draft must have been expected to bring for fewer requests to be a reason to wake."""
FIRST_NAP, LONGEST_NAP = 256, 1 << 14


class Acceptance:
    """Share of drafts accepted at each position, given that those before it were; recent steps count more."""

    def __init__(self, max_depth: int, decay: float = 0.97, prior: float = 0.7, weight: float = 1.0) -> None:
        self._decay = decay
        self._hits = [prior * weight] * max_depth
        self._tries = [weight] * max_depth
        self.num_seen = 0

    def add(self, accepted: list[tuple[int, int]]) -> None:
        if not accepted:
            return
        decay = self._decay
        for i in range(len(self._hits)):
            judged = sum(1 for depth, good in accepted if depth > i and good >= i)
            if judged:
                self._tries[i] = self._tries[i] * decay + judged
                self._hits[i] = self._hits[i] * decay + sum(1 for depth, good in accepted if depth > i and good > i)
        self.num_seen += len(accepted)

    def expected(self, depth: int) -> float:
        """Tokens that a step of this depth brings for a request, the target's own included."""
        tokens, chance = 1.0, 1.0
        for hits, tries in zip(self._hits[:depth], self._tries):
            chance *= hits / tries
            tokens += chance
        return tokens


class _Prices:
    """Seconds of a step by depth, for one size of batch."""

    def __init__(self, max_depth: int) -> None:
        self._times: list[deque[float]] = [deque(maxlen=2 * TRIES + 1) for _ in range(max_depth + 1)]
        self.follow: deque[float] = deque(maxlen=2 * TRIES + 1)

    def add(self, depth: int, seconds: float, follow: float) -> None:
        self._times[depth].append(seconds)
        if follow:
            self.follow.append(follow)

    def known(self, depth: int) -> bool:
        return len(self._times[depth]) >= TRIES

    def forget(self, depth: int) -> None:
        """The oldest times go, so that it is tried again."""
        times = self._times[depth]
        while len(times) >= TRIES:
            times.popleft()

    def of(self, depth: int) -> float:
        """Measured, or on the line through the two measured depths nearest to it."""
        if self._times[depth]:
            return median(self._times[depth])
        known = [d for d, times in enumerate(self._times) if times]
        near = sorted(sorted(known, key=lambda d: abs(d - depth))[:2])
        if len(near) < 2:
            return median(self._times[near[0]])
        low, high = near
        cheap, dear = median(self._times[low]), median(self._times[high])
        return cheap + (dear - cheap) * (depth - low) / (high - low)

    def asleep(self) -> float:
        """A step without drafts whose tokens the drafter does not follow."""
        return self.of(0) - (median(self.follow) if self.follow else 0.0)


class AutoDepth:
    """See the module."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._max = config.num_steps
        self._acceptance = Acceptance(self._max)
        self._prices: dict[int, _Prices] = {}
        self._awake = True
        self._losses = 0
        self._nap = FIRST_NAP
        self._steps = 0
        self._wake_at = 0
        self._asleep_size = 0

    @property
    def following(self) -> bool:
        return self._awake

    def choose(self, num_requests: int, num_draftable: int) -> int:
        self._steps += 1
        size = _size(num_requests)
        if not self._awake and (self._steps >= self._wake_at or size < self._asleep_size):
            self._wake()
        if not self._awake or not num_draftable:
            return 0
        prices = self._prices.setdefault(size, _Prices(self._max))
        for depth in (self._max, 0):  # the whole curve of acceptance first, then what it is compared with
            if not prices.known(depth):
                return depth
        best = self._best(prices)
        if not prices.known(best):
            return best
        if self._steps % RETRY_EVERY == 0:
            others = [depth for depth in range(self._max + 1) if depth != best]
            prices.forget(max(others, key=lambda depth: self._speed(prices, depth)))
        self._judge(prices, best, size)
        return best if self._awake else 0

    def observe(
        self, num_requests: int, depth: int, accepted: list[tuple[int, int]], seconds: float, follow: float
    ) -> None:
        self._acceptance.add(accepted)
        if seconds > 0 and self._awake and (len(accepted) == num_requests or depth == 0):
            prices = self._prices.setdefault(_size(num_requests), _Prices(self._max))
            prices.add(depth, seconds, follow)

    def _speed(self, prices: _Prices, depth: int) -> float:
        return self._acceptance.expected(depth) / prices.of(depth)

    def _best(self, prices: _Prices) -> int:
        return max(range(self._max + 1), key=lambda depth: self._speed(prices, depth))

    def _judge(self, prices: _Prices, best: int, size: int) -> None:
        """Goes to sleep after `PATIENCE` steps in which no depth paid."""
        gains = best > 0 and self._speed(prices, best) * prices.asleep() > MARGIN
        if gains:
            self._losses = 0
            if self._acceptance.num_seen > 16 * PATIENCE:
                self._nap = FIRST_NAP
            return
        self._losses += 1
        if self._losses >= PATIENCE:
            self._awake = False
            self._asleep_size = size if self._acceptance.expected(1) > WORTH_WAKING else 0
            self._wake_at = self._steps + self._nap
            self._nap = min(2 * self._nap, LONGEST_NAP)

    def _wake(self) -> None:
        self._awake = True
        self._losses = 0
        self._acceptance = Acceptance(self._max)
        for prices in self._prices.values():
            prices.forget(self._max)


def _size(num_requests: int) -> int:
    """Batches of like size: 1, 2, 3-4, 5-8, ..."""
    return (num_requests - 1).bit_length()


def make_policy(config: SpeculationConfig) -> DepthPolicy:
    if config.auto_depth:
        return AutoDepth(config)
    return FixedDepth(config.num_steps)
