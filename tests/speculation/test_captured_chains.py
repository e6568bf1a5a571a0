"""Captured steps with every drafter, through scheduler and runner, on a device that calls the captured functions again.
Exact drafters are right at every position, so a wrong token, length, slot or state shows as a draft that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_engine.types import SpeculationConfig
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.speculation.ngram import NgramDrafter
from tests.speculation.test_drafters import LIMITS, MAKERS, TREES, VOCAB, method_of, requests_of
from tests.speculation.toy_engine import MakeDrafter, MarkovTarget, Step, ToyEngine, random_table

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
    assert captured or limits == "retracted"  # a few steps, or none
    assert stats is not None and stats.accepted == stats.proposed


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("depth", "topk", "nodes", "limits", "temperature"), TREES)
def test_trees(depth: int, topk: int, nodes: int, limits: str, temperature: float) -> None:
    """The same tokens, and as many accepted drafts as in steps that are not captured; KV of accepted nodes moves. The
    toy models check the text that every node sees."""
    table, found = random_table(VOCAB, seed=4, spread=1.5), []
    config = SpeculationConfig("nextn", depth, topk, nodes)
    for captured in (0, MOST):
        engine = ToyEngine(table, config, half_right("mtp 1"), page_size=4, captured=captured, **LIMITS[limits])
        requests = requests_of(4, temperature)
        steps = engine.run(requests)
        assert any(whole(step) for step in steps) == bool(captured)
        stats = engine.scheduler.stats().speculation
        assert stats is not None
        assert 0 < stats.accepted[0] < stats.proposed[0] or limits == "retracted"  # few steps have drafts there
        found.append(([request.output_ids for request in requests], stats.accepted, stats.proposed))
    assert found[0] == found[1]


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


def half_right(name: str) -> MakeDrafter:
    """The drafter of another table."""

    def make(runner: ModelRunner, rng: np.random.Generator) -> Any:
        target: Any = runner.model
        runner.forward.model = MarkovTarget(target.table + 2.0 * target.table.roll(1, 2))
        try:
            return MAKERS[name](runner, rng)
        finally:
            runner.forward.model = target

    return make


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", ["standalone", "mtp 1", "mtp 2"])
def test_thresholds_accept_as_in_steps_that_are_not_captured(name: str, temperature: float) -> None:
    """The same tokens; with sampled ones more drafts are accepted than without thresholds."""
    table, lengths, outputs = random_table(VOCAB, seed=3, spread=1.5), [], []
    for captured, thresholds in ((MOST, (0.3, 0.5)), (0, (0.3, 0.5)), (MOST, (1.0, 1.0))):
        single, acc = thresholds
        config = SpeculationConfig(method_of(name), 3, accept_threshold_single=single, accept_threshold_acc=acc)
        engine = ToyEngine(table, config, half_right(name), captured=captured, max_rows=4)
        requests = requests_of(7, temperature)[:16]
        steps = engine.run(requests)
        assert any(whole(step) for step in steps) == bool(captured)
        outputs.append([request.output_ids for request in requests])
        stats = engine.scheduler.stats().speculation
        assert stats is not None
        lengths.append(stats.accept_length)
    assert outputs[0] == outputs[1] and lengths[0] == lengths[1]
    assert lengths[0] > lengths[2] + 0.1 if temperature else outputs[0] == outputs[2]


def test_thresholds_with_prompt_lookup_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """A captured chain without a match consists of token 0, which the thresholds could accept."""
    config = SpeculationConfig("ngram", 3, accept_threshold_single=0.5)
    with caplog.at_level("INFO", logger="moe_engine"), pytest.raises(AssertionError):
        ToyEngine(random_table(VOCAB, seed=3), config, ngrams, captured=MOST)
    assert "Drafts are not captured (acceptance thresholds with NGRAM" in caplog.text


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
