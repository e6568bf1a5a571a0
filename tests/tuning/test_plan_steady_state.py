"""The steady state of a closed loop against a simulation of it, step by step."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace

import pytest

from moe_engine.tuning.costs.efficiency import Efficiency, load_efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.prompt_steps import SAMPLED, PromptSteps
from moe_engine.tuning.planner.steady import Load, PromptTurns, queued, steady_state
from moe_engine.tuning.planner.workload import Workload
from tests.models.published import V3

SHARE = Efficiency("any", prompt_weight=1.0, queue=0.3, request_ms=0.001)
"""Of an engine whose steps have prompts and decodes; this engine's scheduler: test_plan_closed_loop.py."""
COST = RooflineCost(model_facts(V3), Form(8), Precision("fp8", "fp8"), parse_cluster("8xh200"), SHARE)


def simulated(prompt: int, output: int, requests: int) -> tuple[float, float]:
    """Seconds between tokens, output tokens a second: every step decodes all requests and computes one waiting prompt.
    Lengths vary by a fifth, so that requests do not end together."""
    waiting = deque((prompt, round(output * random.uniform(0.8, 1.2))) for _ in range(requests))
    running: list[list[int]] = []  # context, tokens left
    clock = tokens = gaps = 0.0
    start = 0.0
    for step in range(12 * output):
        if step == 4 * output:
            start, tokens, gaps = clock, 0.0, 0.0
        new = waiting.popleft() if waiting else None
        size = prompt if new else 0
        shape = StepShape(
            len(running), sum(context for context, _ in running), 0, size, size * (size + 1) // 2, len(running) + size
        )
        seconds = COST.step(shape).seconds
        clock += seconds
        tokens += len(running)
        gaps += len(running) * seconds
        for request in running:
            request[0], request[1] = request[0] + 1, request[1] - 1
        ended = [request for request in running if request[1] <= 0]
        running = [request for request in running if request[1] > 0]
        waiting.extend((prompt, round(output * random.uniform(0.8, 1.2))) for _ in ended)
        if new:
            running.append([prompt, new[1]])
    return gaps / tokens, tokens / (clock - start)


@pytest.mark.parametrize(
    ("prompt", "output", "requests"), [(1000, 200, 4), (1000, 200, 32), (4000, 300, 16), (100, 100, 64)]
)
def test_time_between_tokens_is_that_of_a_simulation(prompt: int, output: int, requests: int):
    state = steady_state(COST, Form(8), Load(prompt, prompt, output), requests, SHARE, chunk=8192)
    tpot, rate = simulated(prompt, output, requests)
    assert state.tpot_s == pytest.approx(tpot, rel=0.15)
    assert state.output_per_s == pytest.approx(rate, rel=0.2)


def test_requests_that_wait_are_rate_times_time_too():
    running, clients, load = random.randint(1, 100), random.uniform(1, 9), Load(900, 1200, random.randint(2, 3000))
    state = steady_state(COST, Form(8), load, running, SHARE)
    late = queued(state, load, clients)
    stay = late.ttft_s + late.tpot_s * (load.output - 1)
    assert (late.tpot_s, late.output_per_s) == (state.tpot_s, state.output_per_s)
    assert state.output_per_s / load.output * stay == pytest.approx(running * clients)


def test_prompts_wait_for_the_next_poll_and_for_other_groups():
    load, form = Load(900, 900, 300), Form(8, 8, 8, True)
    at_once = steady_state(COST, form, load, 64, SHARE)
    polled = steady_state(COST, form, load, 64, SHARE, turns=PromptTurns(waits=15))
    assert polled.ttft_s - at_once.ttft_s == pytest.approx(14.5 * at_once.step_s)
    together = steady_state(COST, form, load, 64, SHARE, turns=PromptTurns(uneven=0))
    lost = at_once.tpot_s - at_once.step_s
    assert together.tpot_s - together.step_s == pytest.approx(lost / 8**0.5)


def test_prompts_of_equal_requests_share_steps():
    varied = Load(128, 128, 128)
    groups = steady_state(COST, Form(8), replace(varied, equal=True), 64, SHARE)
    decode = COST.step(StepShape(64, 64 * 192, 0, 0, 0, 64))
    steps = PromptSteps(COST, 128, 0, 8192, (StepShape(64, 64 * 192, 0, 0, 0, 64), decode.seconds))
    together = math.sqrt(64)  # between one and all of them
    assert groups.tpot_s == pytest.approx(decode.seconds + 63 * steps.added(together) / together / 128)
    apart = [steady_state(COST, Form(8), load, 64, SHARE, chunk=128) for load in (varied, replace(varied, equal=True))]
    assert groups.tpot_s < apart[0].tpot_s == apart[1].tpot_s  # a chunk of one prompt


def test_equal_requests_of_an_engine_with_prompts_first_wait_for_all_prompts():
    """All end together, and no request decodes before the last prompt: as in this engine's scheduler."""
    share = replace(SHARE, prompts_first=True)
    for prompt, rows in ((128, 64), (4000, 9)):
        equal = Load(prompt, prompt, 500, equal=True)
        state = steady_state(COST, Form(8), equal, rows, share)
        shape = StepShape(rows, rows * (prompt + 250), 0, 0, 0, rows)
        decode = COST.step(shape)
        steps = PromptSteps(COST, prompt, 0, 8192, (shape, decode.seconds))
        first = share.request_ms * 1e-3 + 0.5 * decode.seconds + steps.first_tokens(rows)
        assert state.ttft_s == pytest.approx(first)
        assert state.ttft_s > steady_state(COST, Form(8), equal, rows, SHARE).ttft_s
        varied = replace(equal, equal=False)
        apart = [steady_state(COST, Form(8), varied, rows, each) for each in (share, SHARE)]
        assert apart[0] == apart[1]


def test_requests_are_rate_times_time():
    """Little's law, for any form."""
    for _ in range(20):
        requests, output = random.randint(1, 500), random.randint(2, 3000)
        form = random.choice([Form(8), Form(8, 8, 8, True), Form(8, 2, 8)])
        state = steady_state(COST, form, Load(900, 1200, output), requests, SHARE)
        stay = state.ttft_s + state.tpot_s * (output - 1)
        assert state.output_per_s / output * stay == pytest.approx(requests)


def test_one_request_alone_waits_for_nobody():
    state = steady_state(COST, Form(8), Load(500, 500, 100), 1, SHARE)
    assert state.tpot_s == state.step_s == COST.step(StepShape(1, 550, 0, 0, 0, 1)).seconds
    assert state.busy == 0


def test_accepted_drafts_shorten_the_time_between_tokens():
    load = Load(500, 500, 100)
    plain = steady_state(COST, Form(8), load, 4, SHARE)
    drafted = steady_state(COST, Form(8), load, 4, SHARE, drafts=2, accepted=1.5)
    useless = steady_state(COST, Form(8), load, 4, SHARE, drafts=2, accepted=0.0)
    assert drafted.tpot_s < plain.tpot_s < useless.tpot_s


def test_chunks_cost_more_than_a_whole_prompt_and_cached_tokens_less():
    whole = steady_state(COST, Form(8), Load(8000, 8000, 100), 8, SHARE, chunk=8192)
    chunked = steady_state(COST, Form(8), Load(8000, 8000, 100), 8, SHARE, chunk=1024)
    cached = steady_state(COST, Form(8), Load(1000, 8000, 100), 8, SHARE, chunk=8192)
    assert cached.prompt_s < whole.prompt_s < chunked.prompt_s
    alone = replace(SHARE, queue=0.0)
    assert steady_state(COST, Form(8), Load(8000, 8000, 100), 8, alone).ttft_s < whole.ttft_s


def test_many_chunks_of_a_prompt_are_interpolated():
    chunk, cached = random.choice([64, 100, 256]), random.choice([0, random.randint(1, 50_000)])
    computed = chunk * random.randint(SAMPLED + 1, 900) + random.randrange(chunk)
    seconds, before = 0.0, cached
    while before < cached + computed:
        tokens = min(chunk, cached + computed - before)
        pairs = tokens * before + tokens * (tokens + 1) // 2
        seconds += COST.step(StepShape(0, 0, 0, tokens, pairs, tokens)).seconds
        before += tokens
    assert PromptSteps(COST, computed, cached, chunk).added(1.0) == pytest.approx(seconds, rel=2e-3)


def test_turns_of_a_conversation_are_cached():
    first = Workload(1000, 200).load()
    later = Workload(1000, 200, shared=512, turns=4).load()
    assert (first.computed, first.prompt) == (1000, 1000)
    prompts = [512 + turn * 1200 + 1000 for turn in range(4)]
    assert later.computed == 1000 and later.prompt == sum(prompts) / 4
    assert Workload(1000, 200, 512, 4).longest == prompts[-1] + 200


@pytest.mark.parametrize("equal", [False, True])
def test_a_decode_engine_loses_no_step_to_prompts(equal: bool):
    """Another engine computes the prompts (`Load.computed` 0): answers take as long as their decode steps."""
    share, requests = load_efficiency("moe-engine"), random.choice([16, 64, 256])
    for groups in (1, 2, 8):
        load = Load(0.0, random.uniform(200, 4000), random.uniform(50, 2000), equal)
        state = steady_state(COST, Form(8, groups), load, requests, share)
        assert math.isclose(state.tpot_s, state.step_s), groups
