"""Captured steps with every drafter, through scheduler and runner, on a device that calls the captured functions again.
Exact drafters are right at every position, so a wrong token, length, slot or state shows as a draft that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_engine.types import SpeculationConfig
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.speculation.ngram import NgramDrafter
from tests.speculation.test_drafters import LIMITS, MAKERS, VOCAB, method_of, requests_of
from tests.speculation.toy_engine import Step, ToyEngine, random_table

MOST = 64


def ngrams(runner: ModelRunner, rng: np.random.Generator) -> NgramDrafter:
    assert runner.rows.history is not None
    return NgramDrafter(runner.rows.history, 1, 4, runner.stream)


DRAFTERS = {**MAKERS, "ngram": ngrams}


def run(name: str, depth: int, page_size: int, limits: str, temperature: float, **more: Any) -> tuple[ToyEngine, int]:
    """Tokens as without drafts. Returns also the number of captured steps with drafts."""
    table = random_table(VOCAB, seed=page_size, spread=1.5 if name != "ngram" else 4.0)
    config = SpeculationConfig(method_of(name), depth)
    engine = ToyEngine(table, config, DRAFTERS[name], page_size=page_size, captured=MOST, **LIMITS[limits], **more)
    num = 12 if "max_rows" in more else 40
    plain, drafted = requests_of(page_size, temperature)[:num], requests_of(page_size, temperature)[:num]
    ToyEngine(table, page_size=page_size).run(plain)
    steps = engine.run(drafted)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    return engine, sum(whole(step) for step in steps)


def whole(step: Step) -> bool:
    drafts = step.plan.speculation is not None and step.plan.speculation.depth > 0
    return step.result.cuda_graph and drafts


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("depth", "page_size", "limits", "temperature"),
    [(1, 1, "plain", 0.0), (3, 4, "cut", 1.0), (4, 1, "retracted", 0.0), (2, 4, "retracted", 1.0)],
)
@pytest.mark.parametrize("name", MAKERS)
def test_exact_drafts_are_always_accepted(
    name: str, depth: int, page_size: int, limits: str, temperature: float
) -> None:
    """A few captured steps among steps that compute prompts too, chunks of them, and retractions."""
    engine, captured = run(name, depth, page_size, limits, temperature)
    stats = engine.scheduler.stats().speculation
    assert captured and stats is not None and stats.accepted == stats.proposed


@pytest.mark.parametrize("limits", ["cut", "retracted"])
def test_ngrams(limits: str) -> None:
    engine, captured = run("ngram", 3, 1, limits, 0.0, **({"max_rows": 3} if limits == "cut" else {}))
    stats = engine.scheduler.stats().speculation
    assert captured and stats is not None and 0 < stats.accepted[0] < stats.proposed[0]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_most_steps_are_captured(name: str, rows: int) -> None:
    """Few rows, which are reused: nothing of the last request remains. Texts share cached prefixes with two."""
    engine, captured = run(name, 3, 1, "plain", 0.0, max_rows=rows, disable_radix_cache=rows == 1)
    stats = engine.scheduler.stats().speculation
    assert captured > 4 and stats is not None and stats.accepted == stats.proposed


def test_a_draft_model_catches_up_behind_steps_without_drafts() -> None:
    """Whatever steps a row had: plain ones, captured ones without drafts, with drafts."""
    engine, _ = run("standalone", 2, 1, "plain", 0.0, max_rows=2)
    drafter, rows = engine.drafter, np.array([0, 1])
    calls: list[tuple[list[int], list[int]]] = []
    extend = drafter._draft_extend
    drafter._draft_extend = lambda rows, ends: calls.append((rows.tolist(), ends.tolist())) or extend(rows, ends)
    drafter._num_cached[rows], drafter._drafted[rows] = 1, (True, False)
    drafter.catch_up(rows, [6, 4], 2)
    assert calls == [([1], [3])], "a row whose last step had drafts needs nothing"
    drafter.catch_up(rows, [8, 6], 0)
    drafter.catch_up(rows, [9, 7], 2)
    assert calls[1:] == [([0, 1], [8, 6])]
