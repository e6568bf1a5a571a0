"""Gaps between the tokens of a simulated run, counted: a day of traffic has more gaps than fit into memory."""

from __future__ import annotations

import math
from collections import defaultdict

RESOLUTION = 1e-5
"""Resolution in seconds, to which gaps are rounded."""


class GapHistogram:
    """Counts of gaps, and of tokens in each second of the run."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._tokens: defaultdict[int, int] = defaultdict(int)
        self._sum = self._squares = 0.0

    def add(self, gap: float, count: int) -> None:
        """`count` gaps of this many seconds."""
        self._counts[round(gap / RESOLUTION)] += count
        self._sum += gap * count
        self._squares += gap * gap * count

    def add_tokens(self, moment: float, count: int) -> None:
        """Tokens that arrived at this second of the run."""
        self._tokens[int(moment)] += count

    def add_steps(self, begin: float, gap: float, steps: int, rows: int) -> None:
        """A token of each of `rows` requests in each of `steps` steps of `gap` seconds, the first one after `begin`."""
        self.add(gap, rows * steps)
        if int(begin + gap) == int(begin + steps * gap):
            self.add_tokens(begin + gap, rows * steps)
            return
        for number in range(1, steps + 1):
            self.add_tokens(begin + number * gap, rows)

    def add_all(self, other: GapHistogram) -> None:
        """Adds the gaps and tokens of another part of the run."""
        for ours, theirs in ((self._counts, other._counts), (self._tokens, other._tokens)):
            for key, count in theirs.items():
                ours[key] += count
        self._sum += other._sum
        self._squares += other._squares

    @property
    def num_gaps(self) -> int:
        return sum(self._counts.values())

    @property
    def peak_tokens(self) -> float:
        """Max tokens in one second."""
        return float(max(self._tokens.values(), default=0))

    def percentile(self, q: float) -> float:
        """Seconds: the smallest gap that at least q percent of the gaps do not exceed; 0 without gaps."""
        left = self.num_gaps * q / 100
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return bucket * RESOLUTION
        return 0.0

    def distribution(self, name: str) -> dict[str, float]:
        """As `serving_report.distribution`."""
        total = self.num_gaps
        mean = self._sum / total if total else 0.0
        variance = max(self._squares / total - mean * mean, 0.0) if total else 0.0
        values = {"mean": mean, "median": self.percentile(50), "std": math.sqrt(variance)}
        values |= {f"p{q}": self.percentile(q) for q in (90, 95, 99)}
        values["max"] = max(self._counts, default=0) * RESOLUTION
        return {f"{kind}_{name}_ms": value * 1e3 for kind, value in values.items()}
