"""`answer_seconds` and `idle_seconds` from requests beside each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning import mixed_probe, mixed_replay
from moe_engine.tuning.costs.measured import CostFile, Curve

SCHEDULER = SchedulerConfig(num_slots=8000, context_len=512, max_rows=16, chunked_prefill_size=256)


def test_the_correction_finds_what_a_request_waits_less_under_load() -> None:
    rng = random.Random(random.getrandbits(32))
    true = CostFile(
        {0: Curve((1.0, 16.0), (0.002, 0.006))},
        Curve((1.0, 256.0), (0.003, 0.02)),
        answer_seconds=0.004,
        request_seconds=0.001,
        token_seconds=1e-5,
        idle_seconds=0.003,
    )
    parts = []
    for _ in range(4):
        call, calls, lengths = 1000.0, [], []
        for number in range(60):
            call += rng.expovariate(0.6 / 0.02) * (number > 0)
            calls.append((call, call + 0.001))
            lengths.append(mixed_probe.request_lengths(rng, 200))
        part = mixed_probe.Part([], calls, [], lengths)
        answers = mixed_replay.replay(true, part, SCHEDULER)
        ends = [1000.0 + answer.started + answer.latency for answer in answers]
        parts.append(replace(part, ends=ends, ttfts=[answer.ttft for answer in answers]))
    shift = rng.choice([-0.0015, 0.0025])
    lone = replace(true, answer_seconds=true.answer_seconds + shift, idle_seconds=true.idle_seconds - shift)
    slower = rng.uniform(0.7, 1.4)
    curve = Curve(true.prefill.counts, tuple(seconds / slower for seconds in true.prefill.seconds))
    effects = mixed_probe.Effects(0.0, 0.0, (0.0,) * 4, (slower,) * 4)
    found = mixed_replay.corrected(replace(lone, prefill=curve), parts, effects, SCHEDULER)
    assert found.answer_seconds == pytest.approx(true.answer_seconds, abs=1e-3)
    assert found.idle_seconds == pytest.approx(true.idle_seconds, abs=1e-3)
    assert mixed_replay.corrected(lone, [], effects, SCHEDULER) == lone


def test_an_answer_takes_no_longer_than_after_a_pause():
    """A long queue in front of the engine is no time of an answer outside it."""
    curve = Curve((1.0,), (0.002,))
    file = CostFile({0: curve}, Curve((1.0,), (0.003,)), answer_seconds=0.003, idle_seconds=0.002)
    part = mixed_probe.Part([], [(0.0, 0.0), (0.001, 0.002)], [9.0, 9.0], [(8, 4), (8, 4)], [0.2, 0.2])
    found = mixed_replay.corrected(file, [part], mixed_probe.Effects(0.0, 0.0, (1.0,), (1.0,)), SCHEDULER)
    assert found.answer_seconds == pytest.approx(0.005) and found.idle_seconds == pytest.approx(0.0)


def test_an_answer_takes_at_least_the_work_of_the_front_end() -> None:
    file = CostFile({0: Curve((1.0,), (0.002,))}, Curve((1.0,), (0.003,)), answer_seconds=0.003, request_seconds=0.002)
    part = mixed_probe.Part([], [(0.0, 0.0), (0.001, 0.002)], [9.0, 9.0], [(8, 4), (8, 4)], [0.0001, 0.0001])
    found = mixed_replay.corrected(file, [part], mixed_probe.Effects(0.0, 0.0, (1.0,), (1.0,)), SCHEDULER)
    assert found.answer_seconds == 0.002 and found.idle_seconds == pytest.approx(0.001)
