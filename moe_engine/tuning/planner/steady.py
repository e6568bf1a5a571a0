"""The steady state of one replica under a fixed number of concurrent requests (closed loop).

A request's tokens wait for the decode steps of its batch and for the prompts of other requests: while one request runs,
each of the N - 1 others computes one prompt. Legend: N concurrency of a replica, n rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.step_cost import StepCostModel, StepShape

UNEVEN = 0.5
"""Exponent of the number of attention groups in the delay by other groups' prompts: 0 if all groups prefill in the same
steps, 1 if never."""


@dataclass(frozen=True)
class Load:
    """Requests of a workload: mean computed prompt tokens (prefix hits left out; 0: another engine computes them),
    prompt tokens and output tokens."""

    computed: float
    prompt: float
    output: float

    @property
    def held(self) -> float:
        """KV slots of a request when it ends."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Steady:
    """The steady state of one replica: seconds to the first token (mean, without its own transfer), between tokens,
    output tokens a second, and the parts of a decode step and of a prompt.

    Attributes:
        step_s: seconds of a decode step alone. prompt_s: seconds that a prompt adds to its steps.
        busy: share of the time in which prompts are computed.
    """

    ttft_s: float
    tpot_s: float
    output_per_s: float
    step_s: float
    prompt_s: float
    busy: float
    decode_parts: Mapping[str, float]
    prompt_parts: Mapping[str, float]


def steady_state(
    cost: StepCostModel,
    form: Form,
    load: Load,
    concurrency: float,
    share: Efficiency,
    chunk: int = 8192,
    drafts: int = 0,
    accepted: float = 0.0,
    prompt_deviation: float = 1.0,
    beside_s: float = 0.0,
    front_end_s: float = 0.0,
) -> Steady:
    """Predicts a replica.

    Args:
        concurrency: running requests of the replica. chunk: prompt tokens of a step of one attention group.
        drafts, accepted: draft tokens that a step verifies, and the mean number of accepted ones.
        prompt_deviation: measured factor on the time to the first token.
        beside_s: seconds by which another request lengthens steps beside its prompt.
        front_end_s: seconds of the front end for a request, which it takes one after the other.
    """
    rows = max(1, round(concurrency / form.attn_dp + 0.499))
    everyone = max(1, round(concurrency))
    context = round(rows * (load.prompt + load.output / 2))
    queries = 1 + drafts
    decode = cost.step(StepShape(rows, context, drafts, 0, 0, everyone * queries))
    prompt_s, parts = _prompt(cost, form, load, rows, context, drafts, everyone * queries, chunk, decode.seconds)
    per_token = decode.seconds / (1 + accepted)
    groups = form.attn_dp
    prompts = max(0.0, rows - 1) * groups**UNEVEN if groups > 1 else max(0.0, concurrency - 1)
    others = share.prompt_weight * prompts * (prompt_s + beside_s) / max(1.0, load.output)
    tpot = per_token + others
    waiting = share.queue * max(0.0, rows - 1) * prompt_s
    ttft = share.request_ms * 1e-3 + prompt_deviation * (0.5 * decode.seconds + prompt_s + waiting)
    tpot = max(tpot, (concurrency * front_end_s - ttft) / max(1.0, load.output - 1))
    cycle = ttft + tpot * max(0.0, load.output - 1)
    return Steady(
        ttft,
        tpot,
        concurrency * load.output / cycle,
        decode.seconds,
        prompt_s,
        others / tpot,
        decode.by_resource,
        parts,
    )


def _prompt(
    cost: StepCostModel, form: Form, load: Load, rows: int, context: int, drafts: int, everyone: int, chunk: int,
    decode_s: float,
) -> tuple[float, Mapping[str, float]]:  # fmt: skip
    """Seconds that one prompt adds to the steps in which it is computed beside the decodes, and their resources."""
    left = max(1, round(load.computed)) if load.computed else 0
    before, seconds = round(load.prompt - load.computed), 0.0
    parts: dict[str, float] = {}
    while left > 0:
        tokens = min(left, chunk)
        pairs = tokens * before + tokens * (tokens + 1) // 2
        fresh = tokens if before < tokens else 0
        shape = StepShape(rows, context, drafts, tokens, pairs, everyone + tokens, 0.0, before, fresh)
        step = cost.step(shape)
        seconds += step.seconds - decode_s
        for name, value in step.by_resource.items():
            parts[name] = parts.get(name, 0.0) + value
        left, before = left - tokens, before + tokens
    return seconds, parts
