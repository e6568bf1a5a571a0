"""What a step costs by the number of its requests and the depth of their drafts, learned from the steps that ran.

A step that speculates is the target's forward over all tokens, what drafting takes even at depth 0, a level of
drafting for each depth, and following. The forward's time is a curve over its tokens, whether these are drafts or many
requests; following's too; the others' are curves over the requests. So a few depths at a few sizes of batch tell the
price of the others.

A plain step has less to keep books of than one that speculates, which a short step feels. What it costs is measured
while drafting sleeps; until then it is between the time of the model and that of the step without drafts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import log2
from statistics import median

from moe_engine.types import SpeculationConfig

BELIEVED = 3
"""Measurements after which a size counts as known."""
NEAR = 4
"""Buckets (a factor of two) over which a straight line is trusted."""
KEPT = 7
"""Measurements of a size that are looked at: the newest."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decode step: its shape, and its seconds in all, in drafting, in following and in the model.

    `model_seconds` is 0 where it was not measured apart. `plain`: the step was planned without speculation, as every
    one is while drafting sleeps.
    """

    num_requests: int
    num_drafting: int
    depth: int
    seconds: float
    draft_seconds: float
    follow_seconds: float
    model_seconds: float = 0.0
    plain: bool = False


class Curve:
    """Seconds over a count: the medians at the counts seen, straight lines between them.

    Beyond the last it goes on as between the last two; a single point is taken as half fixed, half proportional.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, tuple[float, float]] = {}  # by bucket: count and seconds
        self._stale: set[int] = set()  # buckets with measurements newer than their medians
        self._order: list[int] = []  # buckets, ascending

    def add(self, count: int, seconds: float) -> None:
        bucket = _bucket(count)
        seen = self._seen.get(bucket)
        if seen is None:
            seen = self._seen[bucket] = deque(maxlen=KEPT)
            insort(self._order, bucket)
        seen.append((count, seconds))
        self._stale.add(bucket)  # a step is no time for medians: they are looked at much more seldom

    def knows(self, count: int) -> bool:
        """Whether there were enough measurements at about this count, or not far from it on both sides."""
        bucket = _bucket(count)
        near = [b for b in range(bucket - NEAR, bucket + NEAR + 1) if len(self._seen.get(b, ())) >= BELIEVED]
        return bucket in near or (bool(near) and near[0] < bucket < near[-1])

    def knows_near(self, count: int) -> bool:
        """Whether there were enough at half to twice that count."""
        bucket = _bucket(count)
        return any(len(self._seen.get(b, ())) >= BELIEVED for b in range(bucket - NEAR, bucket + NEAR + 1))

    def below(self, count: int) -> float | None:
        """The most seconds of any measured count up to this one; None if this one itself was measured often enough."""
        bucket = _bucket(count)
        if len(self._seen.get(bucket, ())) >= BELIEVED:
            return None
        points = self._points
        return max((points[b][1] for b in self._order if b <= bucket), default=0.0)

    @property
    def is_empty(self) -> bool:
        return not self._seen

    def clear(self) -> None:
        self._seen.clear()
        self._medians.clear()
        self._stale.clear()
        self._order.clear()

    @property
    def _points(self) -> dict[int, tuple[float, float]]:
        """The medians of every bucket."""
        for bucket in self._stale:
            seen = self._seen[bucket]
            self._medians[bucket] = (median(c for c, _ in seen), median(s for _, s in seen))
        self._stale.clear()
        return self._medians

    def at(self, count: int) -> float:
        order, points = self._order, self._points
        if len(order) == 1:
            known, seconds = points[order[0]]
            return seconds * (0.5 + 0.5 * count / known)
        above = min(max(bisect_left(order, _bucket(count)), 1), len(order) - 1)
        if points[order[above]][0] < count and above + 1 < len(order):
            above += 1
        (x0, y0), (x1, y1) = points[order[above - 1]], points[order[above]]
        slope = max(y1 - y0, 0.0) / (x1 - x0)  # more never takes less: else it is noise
        return max(y0 + slope * (count - x0), 0.1 * min(y0, y1))


class StepCostModel:
    """See the module."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._plain = Curve()
        self._forward = Curve()
        self._books = Curve()
        self._setup = Curve()
        self._level = Curve()
        self._follow = Curve()
        self.deepest = 0
        """Depth tried so far, since drafting was forgotten last."""

    @property
    def knows_drafting(self) -> bool:
        return not self._level.is_empty

    def forget_drafting(self) -> None:
        """What drafts cost is to be learned again (it slept); what tokens cost is kept."""
        self._level.clear()
        self._follow.clear()
        self.deepest = 0

    def add(self, cost: StepCost) -> None:
        if cost.plain:
            self._plain.add(cost.num_requests, cost.seconds)
            return
        tokens = self._tokens(cost.num_requests, cost.num_drafting, cost.depth)
        self._forward.add(tokens, cost.seconds - cost.draft_seconds - cost.follow_seconds)
        if cost.model_seconds:
            books = cost.seconds - cost.draft_seconds - cost.follow_seconds - cost.model_seconds
            self._books.add(cost.num_requests, max(books, 0.0))
        if cost.follow_seconds:
            self._follow.add(tokens, cost.follow_seconds)
        if not cost.depth:
            self._setup.add(cost.num_requests, cost.draft_seconds)
        elif cost.num_drafting:
            levels = max(cost.draft_seconds - self._setup_of(cost.num_requests), 0.0)
            self._level.add(cost.num_drafting, levels / cost.depth)
            self.deepest = max(self.deepest, cost.depth)

    def knows(self, num_requests: int) -> bool:
        """Whether a step that speculates without drafts was measured often enough."""
        return self._forward.knows(num_requests)

    def knows_plain(self, num_requests: int) -> bool:
        """Whether a plain step of about that size was."""
        return self._plain.knows_near(num_requests)

    def of(self, num_requests: int, num_drafting: int, depth: int) -> float:
        """Seconds of a step that the drafter follows."""
        tokens = self._tokens(num_requests, num_drafting, depth)
        follow = 0.0 if self._follow.is_empty else self._follow.at(tokens)
        level = depth * self._level.at(num_drafting) if depth else 0.0
        return self._forward.at(tokens) + self._setup_of(num_requests) + level + follow

    def at_best(self, num_requests: int, num_drafting: int, depth: int) -> float | None:
        """Seconds of a step if forward and drafting take no longer than the largest ones measured; None if this forward
        was measured."""
        tokens = self._tokens(num_requests, num_drafting, depth)
        forward = self._forward.below(tokens)
        if forward is None:
            return None
        follow = 0.0 if self._follow.is_empty else self._follow.below(tokens) or self._follow.at(tokens)
        levels = min(depth, max(self.deepest, 1)) * self._level.at(num_drafting)
        return forward + self._setup_of(num_requests) + levels + follow

    def plain(self, num_requests: int) -> tuple[float, float]:
        """Seconds of a plain step: at least, at most; the same where such steps were measured."""
        most = self._forward.at(num_requests)
        if self.knows_plain(num_requests):
            most = min(most, self._plain.at(num_requests))
            return most, most
        books = 0.0 if self._books.is_empty else self._books.at(num_requests)
        return max(most - books, 0.1 * most), most

    def _setup_of(self, num_requests: int) -> float:
        return 0.0 if self._setup.is_empty else self._setup.at(num_requests)

    def _tokens(self, num_requests: int, num_drafting: int, depth: int) -> int:
        return num_requests + num_drafting * (self._config.num_nodes(depth) - 1)


def _bucket(count: int) -> int:
    """Counts of about the same size: exact up to 4, then a quarter of a power of two."""
    return count if count <= 4 else round(4 * log2(count)) - 4
