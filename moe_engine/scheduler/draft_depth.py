"""Adaptive draft depth: chooses the number of draft tokens of each step by the expected tokens a second.

Two estimates are learned while serving. The acceptance rate of each draft position gives the expected tokens of a
request in a step of depth d, 1 + a1 + a1 a2 + ..., less the share of steps in vain behind ended requests;
`step_cost_model` gives the cost of such a step. Both extrapolate to depths that were never tried: the best estimate is
used, but at most twice the depth tried so far. Periodically a step uses the second-best depth, to keep its cost
estimate current.

If no depth beats a plain step, drafting is disabled: the drafter runs no draft extend and costs nothing. Drafting is
enabled again after a backoff (doubled after each failed attempt), or when fewer requests run than when it was disabled;
it then drafts for new requests only. If the cost of a plain step is still unknown, drafting is disabled for a few steps
to measure it.
"""

from __future__ import annotations

from typing import Protocol

from moe_engine.scheduler.step_cost_model import StepCost, StepCostModel
from moe_engine.types import SpeculationConfig

DraftOutcome = tuple[int, int, int]
"""Drafts of one request in a step: verified (without those behind its end), accepted, and used, which is the number of
tokens that the request got beyond that of a plain step. The last step of an answer may accept a draft that it does not
use: a plain step has one token too."""
IN_VAIN: DraftOutcome = (0, 0, -1)
"""Outcome of a request that ended after the step was planned and before it was computed."""


class DepthPolicy(Protocol):
    """Chooses the depth of each step and learns from the results."""

    @property
    def enabled(self) -> bool:
        """Whether drafting is enabled: the drafter runs a draft extend in the next step."""

    def choose(self, num_requests: int, num_draftable: int) -> int:
        """Depth of a step of `num_requests` decodes, of which `num_draftable` can get drafts."""

    def observe(self, outcomes: list[DraftOutcome], cost: StepCost | None) -> None:
        """Takes in the result of a step with decodes.

        Args:
            outcomes: of each request with drafts.
            cost: cost of the step; None if unknown, or if the step had prompts too.
        """


class FixedDepth:
    """A constant depth, ``--speculative-num-steps N``."""

    enabled = True

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, num_requests: int, num_draftable: int) -> int:
        return self._depth

    def observe(self, outcomes: list[DraftOutcome], cost: StepCost | None) -> None:
        return None


KEEP, MAX_KEEP = 4, 32
"""Steps that reuse a choice while the batch size stays the same, doubled each time the same depth is chosen again: a
choice costs about as much as a small operator."""
FIRST_TRIALS = 3
"""First steps with drafts, each with a single draft token."""
MAX_UNMEASURED = 8
"""Max consecutive steps without a cost measurement (all of them had prompts too). Then a single draft token is used
anyway: in a step with a prompt it costs little."""
RETRY_EVERY, MAX_RETRY_EVERY = 96, 768
"""Steps between two trials of the second-best depth, doubled each time the max depth is best: then deeper drafts give
no further information."""
MARGIN = 1.02
"""Drafting must be faster than a plain step by this factor."""
PATIENCE = 4
"""Steps without a gain after which drafting is disabled; half as many for a clear loss."""
CLEAR_LOSS = 0.8
WORTH_ENABLING = 1.3
"""Expected tokens of a single-draft step above which a smaller batch enables drafting again."""
FIRST_BACKOFF, LONGEST_BACKOFF = 512, 1 << 14
"""Steps."""
CLEAR_LOSS_FACTOR = 4
"""Factor of the backoff after a clear loss."""

_DECAY = 0.97
"""Factor on earlier counts for every new step."""
_PRIOR, _PRIOR_TRIES = 0.7, 2.0
"""Rate of the first position before any step, and the number of tries that each position's default counts as."""


class Acceptance:
    """Rate of used drafts of each draft position, given that those before it were used; recent steps count more.

    The rate of a rarely reached position defaults to that of the position before it.
    """

    def __init__(self, max_depth: int) -> None:
        self._hits = [0.0] * max_depth
        self._tries = [0.0] * max_depth
        self._tokens = self._in_vain = 0.0
        self.num_seen = 0

    def add(self, outcomes: list[DraftOutcome]) -> None:
        if not outcomes:
            return
        judged, right = [0] * len(self._hits), [0] * len(self._hits)
        for verified, _, used in outcomes:
            for i in range(min(verified, used + 1)):
                judged[i] += 1
            for i in range(used):
                right[i] += 1
        for i, tries in enumerate(judged):
            if tries:
                self._tries[i] = self._tries[i] * _DECAY + tries
                self._hits[i] = self._hits[i] * _DECAY + right[i]
        self._tokens = self._tokens * _DECAY + sum([used + 1 for _, _, used in outcomes])
        self._in_vain = self._in_vain * _DECAY + outcomes.count(IN_VAIN)
        self.num_seen += len(outcomes)

    def expected(self, depth: int) -> float:
        """Expected tokens of a request in a step of this depth, in those of a plain step. The step in vain at the end
        of an answer counts: it is one of few steps if they have drafts."""
        tokens, ends = self._accepted(depth), self._in_vain / max(self._tokens, 1.0)
        return tokens * (1.0 + ends) / (1.0 + ends * tokens)

    def _accepted(self, depth: int) -> float:
        """Expected tokens of a running request, the target model's own included."""
        tokens, chance, rate = 1.0, 1.0, _PRIOR
        for hits, tries in zip(self._hits[:depth], self._tries):
            rate = (hits + _PRIOR_TRIES * rate) / (tries + _PRIOR_TRIES)
            chance *= rate
            tokens += chance
        return tokens


class AutoDepth:
    """The adaptive policy of the module docstring."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._max = config.num_steps
        self._acceptance = Acceptance(self._max)
        self._costs = StepCostModel(config)
        self._enabled = True
        self._measuring_plain = False
        """Disabled only until the cost of a plain step is known."""
        self._losses = 0
        self._backoff = FIRST_BACKOFF
        self._num_drafted = 0
        """Steps with drafts since drafting was enabled."""
        self._unmeasured = 0
        self._kept, self._kept_for, self._keep_until = 0, (0, 0), 0
        self._keep = KEEP
        self._retry_at = self._retry_every = RETRY_EVERY
        self._steps = 0
        self._enable_at = 0
        self._enable_below = 0
        """Number of requests below which drafting is enabled again."""

    @property
    def enabled(self) -> bool:
        return self._enabled

    def choose(self, num_requests: int, num_draftable: int) -> int:
        self._steps += 1
        if not self._enabled and self._should_enable(num_requests):
            self._enable()
        if not self._enabled or not num_draftable:
            return 0
        if (depth := self._until_costs_are_known(num_requests)) is not None:
            return depth
        batch = num_requests, num_draftable
        if self._kept_for == batch and self._steps < self._keep_until:
            return self._kept
        depths = range(self._max + 1)
        speeds = [self._speed(*batch, depth) for depth in depths]
        best = max(depths, key=speeds.__getitem__)
        drafting = speeds[best] if best else 0.0
        if trial := self._worth_a_trial(*batch, drafting):
            return trial
        self._disable_if_slower(drafting, num_requests)
        if not self._enabled:
            return 0
        most = 2 * self._costs.max_depth_tried
        if self._steps >= self._retry_at:
            self._retry_every = min(2 * self._retry_every, MAX_RETRY_EVERY) if best == self._max else RETRY_EVERY
            self._retry_at = self._steps + self._retry_every
            return min(max((depth for depth in depths if depth != best), key=speeds.__getitem__), most)
        if best <= self._costs.max_depth_tried:
            self._keep_choice(best, batch)
        return min(best, most)

    def _until_costs_are_known(self, num_requests: int) -> int | None:
        """The depth of a step that measures a plain step or a single draft token; None if both costs are known."""
        if not self._costs.knows(num_requests):  # the baseline of every comparison
            self._unmeasured += 1
            return 0 if self._unmeasured <= MAX_UNMEASURED else min(1, self._max)
        self._unmeasured = 0
        if self._num_drafted < FIRST_TRIALS or not self._costs.knows_drafting:
            return min(1, self._max)
        return None

    def _keep_choice(self, depth: int, batch: tuple[int, int]) -> None:
        """Reuses a depth for the next steps of as many (requests, requests that can get drafts)."""
        again = depth == self._kept > 0 and self._kept_for == batch
        self._keep = min(2 * self._keep, MAX_KEEP) if again and self._is_sure else KEEP
        self._kept, self._kept_for = depth, batch
        self._keep_until = self._steps + self._keep

    def observe(self, outcomes: list[DraftOutcome], cost: StepCost | None) -> None:
        self._acceptance.add(outcomes)
        self._num_drafted += bool(outcomes)
        if cost is not None:
            self._costs.add(cost)

    @property
    def _is_sure(self) -> bool:
        """Whether enough drafts were verified to trust the acceptance rates."""
        return self._acceptance.num_seen > 16 * PATIENCE

    def _speed(self, num_requests: int, num_draftable: int, depth: int) -> float:
        return self._tokens(num_requests, num_draftable, depth) / self._costs.of(num_requests, num_draftable, depth)

    def _tokens(self, num_requests: int, num_draftable: int, depth: int) -> float:
        """Expected tokens of a step."""
        return num_requests - num_draftable + num_draftable * self._acceptance.expected(depth)

    def _worth_a_trial(self, num_requests: int, num_draftable: int, best: float) -> int:
        """A depth that might pay off although no depth does by the current costs, which for this batch size are
        extrapolated; else 0."""
        _, most = self._costs.plain(num_requests)
        goal = MARGIN * num_requests / most
        if best > goal:
            return 0
        for depth in range(1, self._max + 1):
            seconds = self._costs.at_best(num_requests, num_draftable, depth)
            if seconds is not None and self._tokens(num_requests, num_draftable, depth) > goal * seconds:
                return depth
        return 0

    def _disable_if_slower(self, best: float, num_requests: int) -> None:
        """Disables drafting after `PATIENCE` steps in which no depth paid off; `best`: speed of the best depth."""
        least, most = self._costs.plain(num_requests)
        if best * least > MARGIN * num_requests:
            self._losses = 0
            if self._is_sure:
                self._backoff = FIRST_BACKOFF
            return
        clear = best * most < CLEAR_LOSS * num_requests
        self._losses += PATIENCE // 2 if clear else 1
        if self._losses < PATIENCE:
            return
        self._enabled = False
        self._losses = 0
        if best * most > MARGIN * num_requests:
            self._measuring_plain = True
            return
        useful = self._acceptance.expected(1) > WORTH_ENABLING
        self._enable_below = (num_requests + 1) // 2 if useful else 0
        backoff = CLEAR_LOSS_FACTOR * self._backoff if clear else self._backoff
        self._enable_at = self._steps + min(backoff, LONGEST_BACKOFF)
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _should_enable(self, num_requests: int) -> bool:
        """Whether the backoff is over."""
        if not self._measuring_plain:
            return self._steps >= self._enable_at or num_requests < self._enable_below
        self._unmeasured += 1
        return self._costs.knows_plain(num_requests) or self._unmeasured > MAX_UNMEASURED

    def _enable(self) -> None:
        self._enabled, self._measuring_plain = True, False
        self._losses = self._num_drafted = self._unmeasured = 0
        self._acceptance = Acceptance(self._max)
        self._costs.forget_drafting()


def make_policy(config: SpeculationConfig) -> DepthPolicy:
    if config.auto_depth:
        return AutoDepth(config)
    return FixedDepth(config.num_steps)
