"""Load of the busiest rank's experts without measurements of the traffic: its tokens over the mean, its active experts.

The popularity of experts varies by `SPREAD` of the mean; a rank holds several experts, whose sum varies less; the
busiest of n ranks is sqrt(2 ln n) deviations above the mean (extreme values of a normal distribution).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from moe_engine.tuning.costs.form import Form

SPREAD = 1.5
"""Without redundant experts. Fitted to SGLang's report of 2025-05-05 on DeepSeek-V3: without EPLB prompts take 1.49
times as long at EP32, decodes 2.54 times at EP72."""

VARIES = 0.5
"""Standard deviation of an expert's share of the tokens, over its mean. Measured Gini coefficients of expert loads
(arXiv 2605.20982) are 0.24 and more on text for MLA and Gated DeltaNet models, 0.29 to 0.38 on random tokens: 0.27 of
this distribution. A rank's straggler (`SPREAD`) also has the drift of the traffic."""

LEAST = 1e-6
"""Share of the experts that a token activates at least."""

BALANCED = 0.15
"""With redundant experts placed by EPLB: the rest, from drift and whole numbers of replicas."""


def expected_skew(num_experts: int, form: Form) -> float:
    """At least 1; 1 if all ranks hold a part of all experts."""
    if form.ep == 1 or not num_experts:
        return 1.0
    held = (num_experts + form.redundant) / form.ep
    spread = BALANCED if form.redundant else SPREAD
    return 1.0 + spread / math.sqrt(held) * math.sqrt(2 * math.log(form.ep))


class Popularity:
    """Experts that no token of a step activates, if some experts are more popular than others.

    The chance that a token activates an expert varies over the experts by a Beta distribution with the mean top_k / E
    and the deviation `VARIES`; the tokens of a step are independent.

    Args:
        mean: top_k / E.
    """

    def __init__(self, mean: float) -> None:
        mean = max(mean, LEAST)  # a config without a known name of top_k
        self._all = mean >= 1.0
        total = max(1.0, (1.0 - mean) / (VARIES**2 * mean) - 1.0)  # of the distribution's two parameters
        self._total, self._rest = total, (1.0 - mean) * total
        self._scale = 0.0 if self._all else math.lgamma(self._total) - math.lgamma(self._rest)

    def idle(self, tokens: int) -> float:
        """Expected share of the experts without any of these tokens."""
        if self._all:
            return float(not tokens)
        return math.exp(self._scale + math.lgamma(self._rest + tokens) - math.lgamma(self._total + tokens))


@lru_cache
def busiest_active(held: int, ranks: int) -> tuple[float, ...]:
    """Expected active experts of the rank with the most of them, by the share of all experts that are active.

    Each of a rank's `held` experts is active with the same chance, so that their number is binomial; the chance that no
    rank has more than m is the product over the ranks. With any active expert some rank has one.

    Returns:
        values at equal distances from a share of 0 to one of 1.
    """
    share = np.linspace(0.0, 1.0, SHARES)
    with np.errstate(divide="ignore"):  # at the ends the first and the last term are exact by the clipped logarithms
        active, idle = np.maximum(np.log(share), -1e9), np.maximum(np.log1p(-share), -1e9)
    below, expected = np.zeros(SHARES), np.zeros(SHARES)
    for most in range(held):  # a mean of whole numbers is the sum over m of the chances to be above m
        ways = math.lgamma(held + 1) - math.lgamma(most + 1) - math.lgamma(held - most + 1)
        below += np.exp(ways + most * active + (held - most) * idle)
        expected += 1.0 - np.minimum(below, 1.0) ** ranks
    return tuple(np.maximum(expected, np.minimum(share * held * ranks, 1.0)).tolist())


SHARES = 513
"""Values of the table of `busiest_active`."""
