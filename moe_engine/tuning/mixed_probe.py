"""What requests cost beside each other: a measurement of `moe-engine calibrate`.

The other measurements have one kind of step at a time. Under load a step also loses time to requests that arrive and
end meanwhile: to their work in the front end and the client, where these share cores with the steps, and to planning.
The server records its steps (`--record-step-times`); what they took beyond the costs measured alone is divided by
the number of requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from moe_engine.tuning.costs.step_cost import StepCostModel, StepShape

PROMPT, ANSWER = (0.25, 1.75), (0.25, 1.75)
"""Least and most tokens, as shares of `MEAN_PROMPT` and `MEAN_ANSWER`."""
MEAN_PROMPT, MEAN_ANSWER = 64, 32
BESIDE = 8
"""Requests that decode together, for the estimate of the server's rate."""
LOAD = 0.6
"""Rate of the requests as a share of the estimate."""
SECONDS, MOST_SECONDS = 6.0, 40.0
LEAST, MOST = 24, 400
"""Requests, of a server that answers as many within `MOST_SECONDS`."""
Step = Sequence[float]
"""Requests that decode, prompt tokens, prompts, seconds."""


def request_lengths(rng: random.Random, most_prompt: int) -> tuple[int, int]:
    """Random tokens of a prompt and an answer."""
    prompt = round(MEAN_PROMPT * rng.uniform(*PROMPT))
    return max(min(prompt, most_prompt), 1), max(round(MEAN_ANSWER * rng.uniform(*ANSWER)), 2)


def rate_of(costs: StepCostModel, drafts: int) -> float:
    """Requests a second for the measurement."""
    decode = costs.step(StepShape(BESIDE, BESIDE * MEAN_PROMPT, drafts, 0, 0, BESIDE)).seconds
    prefill = costs.step(StepShape(0, 0, 0, MEAN_PROMPT, pairs_of(MEAN_PROMPT, 1), MEAN_PROMPT)).seconds
    return LOAD / (prefill + MEAN_ANSWER * decode / BESIDE)


def pairs_of(tokens: int, prompts: int) -> int:
    """Pairs of a token with those before it, of prompts of equal length."""
    return tokens * (tokens // max(prompts, 1) + 1) // 2


async def run(ask: Callable[[int, int], Awaitable[object]], rate: float, most_prompt: int, rng: random.Random) -> int:
    """Sends requests at Poisson times; returns their number.

    Args:
        ask: sends a request with a prompt and an answer of these lengths, and waits for its end.
    """
    count = min(max(round(rate * SECONDS), LEAST), MOST, max(round(rate * MOST_SECONDS), 4))
    due, tasks = time.perf_counter(), []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(ask(*request_lengths(rng, most_prompt))))
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
    await asyncio.gather(*tasks)
    return count


def excess(steps: Sequence[Step], costs: StepCostModel, drafts: int, num_requests: int) -> float:
    """Seconds that the steps took beyond their costs, a request; at least 0."""
    beyond = 0.0
    for decodes, tokens, prompts, seconds in steps:
        rows, new = int(decodes), int(tokens)
        context = rows * (MEAN_PROMPT + MEAN_ANSWER // 2)
        shape = StepShape(rows, context, drafts if rows else 0, new, pairs_of(new, int(prompts)), rows + new)
        beyond += seconds - costs.step(shape).seconds
    return max(beyond / num_requests, 0.0)
