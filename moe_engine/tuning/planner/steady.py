"""The steady state of one replica under a fixed number of concurrent requests (closed loop).

A request's tokens wait for the decode steps of its batch and for the prompts of other requests: while one request runs,
each of the N - 1 others computes one prompt. How long a prompt waits follows from this engine's scheduler
(`prompt_steps`); for other engines it is a measured share of the others' prompts (`Efficiency.queue`). Legend: N
concurrency of a replica, n rows of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.step_cost import StepCostModel, StepShape
from moe_engine.tuning.planner.prompt_steps import (
    Others,
    PromptSteps,
    Waiting,
    of_equal_requests,
    of_parted_requests,
    of_varied_requests,
)


@dataclass(frozen=True)
class PromptTurns:
    """When another engine computes prompts.

    Attributes:
        waits: decode steps that pass before a prompt is computed (half of the running one; with
            `--scheduler-recv-interval` half of the interval; until other attention groups have prompts too).
        uneven: exponent of the number of attention groups in the delay by other groups' prompts: 0 if all groups
            prefill in the same steps, 1 if never.
    """

    waits: float = 0.5
    uneven: float = 0.5


AT_ONCE = PromptTurns()
"""In the next step of their attention group."""


@dataclass(frozen=True)
class MeasuredTimes:
    """What measurements add to the cost of steps.

    Attributes:
        prompt_deviation: factor on the time to the first token.
        beside_s: seconds by which another request lengthens steps other than its prompt's.
        front_end_s: seconds of the frontend for a request, which it takes one after the other.
    """

    prompt_deviation: float = 1.0
    beside_s: float = 0.0
    front_end_s: float = 0.0


STEPS_ALONE = MeasuredTimes()


@dataclass(frozen=True)
class Load:
    """Requests of a workload: mean computed prompt tokens (prefix hits left out; 0: another engine computes them),
    prompt tokens and output tokens. `equal`: all requests have these numbers, else they vary."""

    computed: float
    prompt: float
    output: float
    equal: bool = False

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
    mixed: bool = False,
    turns: PromptTurns = AT_ONCE,
    times: MeasuredTimes = STEPS_ALONE,
) -> Steady:
    """Predicts a replica.

    Args:
        concurrency: running requests of the replica. chunk: prompt tokens of a step of one attention group.
        drafts, accepted: draft tokens that a step verifies, and the mean number of accepted ones.
        mixed: steps have prompts and decodes (`--enable-mixed-chunk`).
        turns: another engine's, if its launch is known.
    """
    groups, outside_s = form.attn_dp, share.request_ms * 1e-3
    rows = max(1, round(concurrency / groups + 0.499))
    everyone = max(1, round(concurrency)) * (1 + drafts)
    shape = StepShape(rows, round(rows * (load.prompt + load.output / 2)), drafts, 0, 0, everyone)
    decode = cost.step(shape)
    fitted = share.queue is not None
    # with mixed steps the requests of a full prompt step go on before the others are computed
    parted = mixed and groups == 1 and load.equal and rows * load.computed > chunk
    in_step = load.equal and not parted
    # with attention DP some groups decode while others compute prompts; requests in step all compute them
    beside = (shape, decode.seconds) if fitted or (not in_step and (mixed or groups > 1)) else None
    steps = PromptSteps(cost, load.computed, load.prompt - load.computed, chunk, beside)
    prompt_s, num_steps = steps.added(1.0), load.output / (1 + accepted)
    others = Others(max(0.0, concurrency - 1), groups, num_steps, decode.seconds, times.beside_s, outside_s)
    if share.queue is not None:
        waiting = _of_engine(share, share.queue, rows, others, steps, turns, load.equal)
    else:
        of_requests = of_equal_requests if in_step else of_parted_requests if parted else of_varied_requests
        waiting = of_requests(steps, others)
    lost = share.prompt_weight * waiting.others / max(1.0, load.output)
    tpot = decode.seconds / (1 + accepted) + lost
    ttft = outside_s + times.prompt_deviation * waiting.first_token
    tpot = max(tpot, (concurrency * times.front_end_s - ttft) / max(1.0, load.output - 1))
    cycle = ttft + tpot * max(0.0, load.output - 1)
    return Steady(
        ttft,
        tpot,
        concurrency * load.output / cycle,
        decode.seconds,
        prompt_s,
        lost / tpot,
        decode.by_resource,
        steps.resources(),
    )


def queued(state: Steady, load: Load, clients: float) -> Steady:
    """With more requests than run at once, of which the others wait for the end of one.

    Args:
        state: of the running requests alone, whose rate is that of all. clients: requests for each running one, at
            least 1.
    """
    answer = state.ttft_s + state.tpot_s * max(0.0, load.output - 1)
    return replace(state, ttft_s=state.ttft_s + (clients - 1) * answer)


def _of_engine(
    share: Efficiency, queue: float, rows: int, others: Others, steps: PromptSteps, turns: PromptTurns, equal: bool
) -> Waiting:
    """Waiting times of another engine, by its measured constants."""
    prompts = (rows - 1) * others.groups**turns.uneven if others.groups > 1 else others.count
    together = _together(rows, others, steps, equal)
    step_s = steps.added(together)
    each_s = step_s / together
    in_step = equal and share.prompts_first
    computed_s = steps.first_tokens(rows) if in_step else step_s + queue * (rows - 1) * each_s
    first = turns.waits * others.decode_s + computed_s
    return Waiting(first, prompts * (each_s + others.beside_s))


def _together(rows: int, others: Others, steps: PromptSteps, equal: bool) -> float:
    """Mean number of prompts of an attention group in a step that has one. Requests of different lengths end at any
    time; those of the same lengths end in groups, between one request and all for which the chunk has room (their
    geometric mean)."""
    arrivals = (rows - 1) / max(1.0, others.num_steps)
    found = arrivals / -math.expm1(-arrivals) if arrivals else 1.0
    if equal and steps.computed:
        found = max(found, math.sqrt(min(rows, steps.chunk / steps.computed)))
    return found
