"""How deep to draft, so that speculation never loses: the depth with the most expected tokens a second.

Two things are learned while serving. The share of drafts accepted at each position gives the tokens that a step of
depth d is expected to bring a request, 1 + a1 + a1 a2 + ...; `step_cost_model` learns what such a step costs. Both say
something about depths that were never tried: the best one on paper is taken, but at most twice as deep as any before.
Now and then a step takes the runner-up, so that its price stays true.

Where nothing beats a plain step, drafting sleeps: the drafter no longer follows and costs nothing. It is woken after a
while (twice as long each time in vain) or when fewer requests run than when it fell asleep, and then drafts for
requests that are new. Where it is open whether drafts pay, because no plain step was measured yet, it sleeps for a few
steps to learn that.
"""

from __future__ import annotations

from typing import Protocol

from moe_engine.scheduler.step_cost_model import StepCost, StepCostModel
from moe_engine.types import SpeculationConfig


class DepthPolicy(Protocol):
    """Chooses the depth of each step and learns from what came of it."""

    @property
    def following(self) -> bool:
        """Whether the drafter should take in what the next step computes."""

    def choose(self, num_requests: int, num_draftable: int) -> int:
        """Depth for a step of `num_requests` decodes, of which `num_draftable` can get drafts."""

    def observe(self, accepted: list[tuple[int, int]], cost: StepCost | None) -> None:
        """A step with decodes is over.

        Args:
            accepted: of each request that had drafts, (positions whose draft was judged, drafts accepted).
            cost: what the step cost; None where that is unknown, or it computed prompts too.
        """


class FixedDepth:
    """Always the same, as ``--speculative-num-steps N`` asks."""

    following = True

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, num_requests: int, num_draftable: int) -> int:
        return self._depth

    def observe(self, accepted: list[tuple[int, int]], cost: StepCost | None) -> None:
        return None


KEEP, KEEP_LONGEST = 4, 32
"""Steps over which a choice is kept while the batch is the same, twice as many each time that drafts are chosen again:
weighing costs about as much as a small operator."""
TRIES = 3
"""Steps with a single draft that begin it all."""
UNPRICED = 8
"""Steps in a row whose price stayed unknown (they all held prompts too) after which a single draft is made unpriced:
beside a prompt it costs little."""
RETRY_EVERY, RETRY_SELDOM = 96, 768
"""Steps between two looks at the runner-up, twice as many each time that the deepest chain is best: then there is
nothing more to learn of deeper drafts."""
MARGIN = 1.02
"""Drafting must be better than not drafting by this factor."""
PATIENCE = 4
"""Steps without a gain after which drafting sleeps; half as many where the loss is clear."""
CLEAR_LOSS = 0.8
WORTH_WAKING = 1.3
"""Tokens that a single draft must have been expected to bring for fewer requests to be a reason to wake."""
FIRST_NAP, LONGEST_NAP = 512, 1 << 14
USELESS = 4
"""A nap after a clear loss is so many times as long."""


class Acceptance:
    """Share of drafts accepted at each position, given that those before it were; recent steps count more.

    Of a position that was hardly ever reached the one before it is the best guess.
    """

    def __init__(self, max_depth: int, decay: float = 0.97, prior: float = 0.7, weight: float = 2.0) -> None:
        self._decay = decay
        self._prior = prior
        self._weight = weight
        self._hits = [0.0] * max_depth
        self._tries = [0.0] * max_depth
        self.num_seen = 0

    def add(self, accepted: list[tuple[int, int]]) -> None:
        if not accepted:
            return
        judged, right = [0] * len(self._hits), [0] * len(self._hits)
        for depth, good in accepted:
            for i in range(min(depth, good + 1)):
                judged[i] += 1
            for i in range(min(depth, good)):
                right[i] += 1
        for i, tries in enumerate(judged):
            if tries:
                self._tries[i] = self._tries[i] * self._decay + tries
                self._hits[i] = self._hits[i] * self._decay + right[i]
        self.num_seen += len(accepted)

    def expected(self, depth: int) -> float:
        """Tokens that a step of this depth brings for a request, the target's own included."""
        tokens, chance, rate = 1.0, 1.0, self._prior
        for hits, tries in zip(self._hits[:depth], self._tries):
            rate = (hits + self._weight * rate) / (tries + self._weight)
            chance *= rate
            tokens += chance
        return tokens


class AutoDepth:
    """See the module."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._max = config.num_steps
        self._acceptance = Acceptance(self._max)
        self._price = StepCostModel(config)
        self._awake = True
        self._learning = False
        """Asleep only until it is known what a plain step costs."""
        self._losses = 0
        self._nap = FIRST_NAP
        self._num_tried = 0
        """Steps with drafts since it woke."""
        self._unpriced = 0
        self._kept, self._kept_for, self._keep_until = 0, (0, 0), 0
        self._keep = KEEP
        self._retry_at = self._retry_every = RETRY_EVERY
        self._steps = 0
        self._wake_at = 0
        self._asleep_below = 0
        """Fewer requests than this are a reason to wake."""

    @property
    def following(self) -> bool:
        return self._awake

    def choose(self, num_requests: int, num_draftable: int) -> int:
        self._steps += 1
        if not self._awake and self._has_slept(num_requests):
            self._wake()
        if not self._awake or not num_draftable:
            return 0
        if not self._price.knows(num_requests):  # what everything is compared with
            self._unpriced += 1
            return 0 if self._unpriced <= UNPRICED else min(1, self._max)
        self._unpriced = 0
        if self._num_tried < TRIES or not self._price.knows_drafting:
            return min(1, self._max)
        if self._kept_for == (num_requests, num_draftable) and self._steps < self._keep_until:
            return self._kept
        depths = range(self._max + 1)
        speeds = [self._speed(num_requests, num_draftable, depth) for depth in depths]
        best = max(depths, key=speeds.__getitem__)
        drafting = speeds[best] if best else 0.0
        trial = self._worth_a_trial(num_requests, num_draftable, drafting)
        if trial:
            return trial
        self._judge(drafting, num_requests)
        if not self._awake:
            return 0
        if self._steps >= self._retry_at:
            self._retry_every = min(2 * self._retry_every, RETRY_SELDOM) if best == self._max else RETRY_EVERY
            self._retry_at = self._steps + self._retry_every
            best = max((depth for depth in depths if depth != best), key=speeds.__getitem__)
            return min(best, 2 * self._price.deepest)
        if best <= self._price.deepest:
            again = best == self._kept > 0 and self._kept_for == (num_requests, num_draftable)
            self._keep = min(2 * self._keep, KEEP_LONGEST) if again and self._is_sure else KEEP
            self._kept, self._kept_for = best, (num_requests, num_draftable)
            self._keep_until = self._steps + self._keep
        return min(best, 2 * self._price.deepest)

    def observe(self, accepted: list[tuple[int, int]], cost: StepCost | None) -> None:
        self._acceptance.add(accepted)
        self._num_tried += bool(accepted)
        if cost is not None:
            self._price.add(cost)

    @property
    def _is_sure(self) -> bool:
        """Whether it has seen enough drafts judged to believe in them."""
        return self._acceptance.num_seen > 16 * PATIENCE

    def _speed(self, num_requests: int, num_draftable: int, depth: int) -> float:
        return self._tokens(num_requests, num_draftable, depth) / self._price.of(num_requests, num_draftable, depth)

    def _tokens(self, num_requests: int, num_draftable: int, depth: int) -> float:
        """What a step is expected to bring."""
        return num_requests - num_draftable + num_draftable * self._acceptance.expected(depth)

    def _worth_a_trial(self, num_requests: int, num_draftable: int, best: float) -> int:
        """A depth that might pay although none does by the prices known, which for this batch are guesses; else 0."""
        _, most = self._price.plain(num_requests)
        goal = MARGIN * num_requests / most
        if best > goal:
            return 0
        for depth in range(1, self._max + 1):
            seconds = self._price.at_best(num_requests, num_draftable, depth)
            if seconds is not None and self._tokens(num_requests, num_draftable, depth) > goal * seconds:
                return depth
        return 0

    def _judge(self, best: float, num_requests: int) -> None:
        """Goes to sleep after `PATIENCE` steps in which no depth paid; `best` is the speed with the best."""
        least, most = self._price.plain(num_requests)
        if best * least > MARGIN * num_requests:
            self._losses = 0
            if self._is_sure:
                self._nap = FIRST_NAP
            return
        clear = best * most < CLEAR_LOSS * num_requests
        self._losses += PATIENCE // 2 if clear else 1
        if self._losses < PATIENCE:
            return
        self._awake = False
        self._losses = 0
        if best * most > MARGIN * num_requests:
            self._learning = True
            return
        worth_it = self._acceptance.expected(1) > WORTH_WAKING
        self._asleep_below = (num_requests + 1) // 2 if worth_it else 0
        self._wake_at = self._steps + min(USELESS * self._nap if clear else self._nap, LONGEST_NAP)
        self._nap = min(2 * self._nap, LONGEST_NAP)

    def _has_slept(self, num_requests: int) -> bool:
        """Whether it is time to wake."""
        if not self._learning:
            return self._steps >= self._wake_at or num_requests < self._asleep_below
        self._unpriced += 1
        return self._price.knows_plain(num_requests) or self._unpriced > UNPRICED

    def _wake(self) -> None:
        self._awake, self._learning = True, False
        self._losses = self._num_tried = self._unpriced = 0
        self._acceptance = Acceptance(self._max)
        self._price.forget_drafting()


def make_policy(config: SpeculationConfig) -> DepthPolicy:
    if config.auto_depth:
        return AutoDepth(config)
    return FixedDepth(config.num_steps)
