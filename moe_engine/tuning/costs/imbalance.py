"""Load of the busiest rank's experts over the mean, without measurements of the traffic.

The popularity of experts varies by `SPREAD` of the mean; a rank holds several experts, whose sum varies less; the
busiest of n ranks is sqrt(2 ln n) deviations above the mean (extreme values of a normal distribution).
"""

from __future__ import annotations

import math

from moe_engine.tuning.costs.form import Form

SPREAD = 1.5
"""Without redundant experts. Fitted to SGLang's report of 2025-05-05 on DeepSeek-V3: without EPLB prompts take 1.49
times as long at EP32, decodes 2.54 times at EP72."""

BALANCED = 0.15
"""With redundant experts placed by EPLB: the rest, from drift and whole numbers of replicas."""


def expected_skew(num_experts: int, form: Form) -> float:
    """At least 1; 1 if all ranks hold a part of all experts."""
    if form.ep == 1 or not num_experts:
        return 1.0
    held = (num_experts + form.redundant) / form.ep
    spread = BALANCED if form.redundant else SPREAD
    return 1.0 + spread / math.sqrt(held) * math.sqrt(2 * math.log(form.ep))
