"""Step cost model: the time of a step by its number of requests and its draft depth, learned from measured steps.

A speculative step consists of the target model's forward over all tokens, the setup of drafting (also at depth 0), one
draft level per depth, and the draft extend. The time of the forward is a curve over its tokens, regardless of whether
they are drafts or further requests; so is the time of the draft extend; the other parts are curves over the requests.
A few depths at a few batch sizes therefore give the cost of all others.

A plain step has less host overhead than a speculative one, which matters for short steps. Its cost is measured while
drafting is disabled; until then it is bounded by the model's time and by the time of a speculative step without drafts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import log2
from statistics import median

from moe_engine.types import SpeculationConfig

MIN_MEASUREMENTS = 3
"""Measurements after which a batch size counts as known."""
OUTLIER = 3.0
"""Seconds over the expected ones above which a few measurements are not trusted."""
NEAR = 4
"""Buckets (a factor of two) over which linear interpolation is trusted."""
MAX_MEASUREMENTS = 7
"""Newest measurements of a size that are kept."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decode step: its shape, and its seconds in total, in drafting, in the draft extend and in the model.

    `model_seconds` is 0 if not measured separately. `plain`: the step was planned without speculation, as all steps
    while drafting is disabled.
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
    """Seconds over a count: medians at the measured counts, linear in between.

    Extrapolates the last segment; a single point counts as half fixed, half proportional.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, tuple[float, float]] = {}  # by bucket: count and seconds
        self._cached: dict[int, tuple[float, float]] = {}
        self._stale: set[int] = set()  # buckets with measurements newer than their medians
        self._order: list[int] = []  # buckets, ascending

    def add(self, count: int, seconds: float) -> None:
        bucket = _bucket(count)
        seen = self._seen.get(bucket)
        if seen is None:
            seen = self._seen[bucket] = deque(maxlen=MAX_MEASUREMENTS)
            insort(self._order, bucket)
        seen.append((count, seconds))
        self._stale.add(bucket)  # medians are computed on demand: they are read much less often than added to

    def knows(self, count: int) -> bool:
        """Whether there are enough measurements at about this count, or near it on both sides."""
        bucket = _bucket(count)
        near = [b for b in range(bucket - NEAR, bucket + NEAR + 1) if len(self._seen.get(b, ())) >= MIN_MEASUREMENTS]
        return bucket in near or (bool(near) and near[0] < bucket < near[-1])

    def knows_near(self, count: int) -> bool:
        """Whether there are enough measurements at half to twice this count."""
        bucket = _bucket(count)
        return any(len(self._seen.get(b, ())) >= MIN_MEASUREMENTS for b in range(bucket - NEAR, bucket + NEAR + 1))

    def below(self, count: int) -> float | None:
        """Max seconds of the measured counts up to this one; None if this count itself has enough measurements."""
        bucket = _bucket(count)
        if len(self._seen.get(bucket, ())) >= MIN_MEASUREMENTS:
            return None
        points = self._points
        return max((points[b][1] for b in self._order if b <= bucket), default=0.0)

    @property
    def is_empty(self) -> bool:
        return not self._seen

    def clear(self) -> None:
        self._seen.clear()
        self._medians.clear()
        self._cached.clear()
        self._stale.clear()
        self._order.clear()

    @property
    def _points(self) -> dict[int, tuple[float, float]]:
        """Count and seconds of every bucket: medians. A bucket with few measurements may hold a single slow one, for
        example a step that compiled a kernel: the value extrapolated from other buckets is used instead."""
        if self._stale:
            for bucket in self._stale:
                seen = self._seen[bucket]
                self._medians[bucket] = (median(c for c, _ in seen), median(s for _, s in seen))
            self._stale.clear()
            known = [b for b in self._order if len(self._seen[b]) >= MIN_MEASUREMENTS]
            self._cached = dict(self._medians)
            if known:
                for bucket in set(self._order).difference(known):
                    count, seconds = self._medians[bucket]
                    expected = _interpolate(known, self._medians, count)
                    if seconds > OUTLIER * expected:
                        self._cached[bucket] = (count, expected)
        return self._cached

    def at(self, count: int) -> float:
        return _interpolate(self._order, self._points, count)


def _interpolate(order: list[int], points: dict[int, tuple[float, float]], count: float) -> float:
    """Seconds at a count, from the points of these buckets."""
    if len(order) == 1:
        known, seconds = points[order[0]]
        return seconds * (0.5 + 0.5 * count / known)
    above = min(max(bisect_left(order, _bucket(count)), 1), len(order) - 1)
    if points[order[above]][0] < count and above + 1 < len(order):
        above += 1
    (x0, y0), (x1, y1) = points[order[above - 1]], points[order[above]]
    slope = max(y1 - y0, 0.0) / (x1 - x0)  # a negative slope is noise
    return max(y0 + slope * (count - x0), 0.1 * min(y0, y1))


class StepCostModel:
    """The cost model of the module docstring."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._plain = Curve()
        self._forward = Curve()
        self._host_overhead = Curve()
        self._setup = Curve()
        self._level = Curve()
        self._extend = Curve()
        self.max_depth_tried = 0
        """Max depth tried since the last `forget_drafting`."""

    @property
    def knows_drafting(self) -> bool:
        return not self._level.is_empty

    def forget_drafting(self) -> None:
        """Drops the costs of drafts, which are outdated after a backoff; keeps the cost of tokens."""
        self._level.clear()
        self._extend.clear()
        self.max_depth_tried = 0

    def add(self, cost: StepCost) -> None:
        if cost.plain:
            self._plain.add(cost.num_requests, cost.seconds)
            return
        tokens = self._tokens(cost.num_requests, cost.num_drafting, cost.depth)
        self._forward.add(tokens, cost.seconds - cost.draft_seconds - cost.follow_seconds)
        if cost.model_seconds:
            host_overhead = cost.seconds - cost.draft_seconds - cost.follow_seconds - cost.model_seconds
            self._host_overhead.add(cost.num_requests, max(host_overhead, 0.0))
        if cost.follow_seconds:
            self._extend.add(tokens, cost.follow_seconds)
        if not cost.depth:
            self._setup.add(cost.num_requests, cost.draft_seconds)
        elif cost.num_drafting:
            levels = max(cost.draft_seconds - self._setup_of(cost.num_requests), 0.0)
            self._level.add(cost.num_drafting, levels / cost.depth)
            self.max_depth_tried = max(self.max_depth_tried, cost.depth)

    def knows(self, num_requests: int) -> bool:
        """Whether a speculative step without drafts was measured often enough."""
        return self._forward.knows(num_requests)

    def knows_plain(self, num_requests: int) -> bool:
        """Whether a plain step of about this size was measured often enough."""
        return self._plain.knows_near(num_requests)

    def of(self, num_requests: int, num_drafting: int, depth: int) -> float:
        """Seconds of a speculative step."""
        tokens = self._tokens(num_requests, num_drafting, depth)
        follow = 0.0 if self._extend.is_empty else self._extend.at(tokens)
        level = depth * self._level.at(num_drafting) if depth else 0.0
        return self._forward.at(tokens) + self._setup_of(num_requests) + level + follow

    def at_best(self, num_requests: int, num_drafting: int, depth: int) -> float | None:
        """Optimistic seconds of a step: forward and drafting no slower than the largest measured ones. None if this
        forward was measured."""
        tokens = self._tokens(num_requests, num_drafting, depth)
        forward = self._forward.below(tokens)
        if forward is None:
            return None
        follow = 0.0 if self._extend.is_empty else self._extend.below(tokens) or self._extend.at(tokens)
        levels = min(depth, max(self.max_depth_tried, 1)) * self._level.at(num_drafting)
        return forward + self._setup_of(num_requests) + levels + follow

    def plain(self, num_requests: int) -> tuple[float, float]:
        """(min, max) seconds of a plain step; equal if such steps were measured."""
        most = self._forward.at(num_requests)
        if self.knows_plain(num_requests):
            most = min(most, self._plain.at(num_requests))
            return most, most
        host_overhead = 0.0 if self._host_overhead.is_empty else self._host_overhead.at(num_requests)
        return max(most - host_overhead, 0.1 * most), most

    def _setup_of(self, num_requests: int) -> float:
        return 0.0 if self._setup.is_empty else self._setup.at(num_requests)

    def _tokens(self, num_requests: int, num_drafting: int, depth: int) -> int:
        return num_requests + num_drafting * (self._config.num_nodes(depth) - 1)


def _bucket(count: float) -> int:
    """Bucket of a count: exact up to 4, then a quarter of a power of two."""
    return int(count) if count <= 4 else round(4 * log2(count)) - 4
