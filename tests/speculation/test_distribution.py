"""Speculation changes no sample: every position has the target's distribution, for any drafts.

Drafters here differ from the target, so that few drafts are accepted. Lossy acceptance accepts exactly the additional
drafts defined by its thresholds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moe_engine.types import SamplingParams, SpeculationConfig
from tests.speculation.toy_engine import (
    CoupledChain,
    FixedChain,
    GrownTree,
    RandomTree,
    Step,
    ToyDrafter,
    ToyEngine,
    distribution,
    make_requests,
    random_table,
)

pytestmark = pytest.mark.drawn(8)

VOCAB = 6
PROMPT = (3, 1, 4)
NUM_NEW = 6
CHAIN = SpeculationConfig("standalone", 3)
TREE = SpeculationConfig("standalone", 3, topk=2, num_draft_tokens=6)


def limit(freedom: int) -> float:
    """The chi-square quantile that is exceeded by chance once in 300 000 times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.5 * (2 / (9 * freedom)) ** 0.5) ** 3


def pair_probabilities(chances: np.ndarray) -> list[np.ndarray]:
    """For each output position the joint probability [V, V] of the previous token and its own; chances [V, V, V]."""
    state = np.zeros((VOCAB, VOCAB))
    state[PROMPT[-2:]] = 1.0
    found = []
    for _ in range(NUM_NEW):
        state = np.einsum("bt,btn->tn", state, chances)
        found.append(state)
    return found


@pytest.mark.parametrize(
    ("drafter", "config", "sampling"),
    [
        (CoupledChain, CHAIN, {"temperature": 1.0}),
        (CoupledChain, CHAIN, {"temperature": 0.8, "top_k": 3}),
        (FixedChain, CHAIN, {"temperature": 1.2, "top_p": 0.8}),
        (GrownTree, TREE, {"temperature": 1.0}),
        (GrownTree, TREE, {"temperature": 1.3, "top_k": 4, "top_p": 0.9}),
        (RandomTree, TREE, {"temperature": 0.7, "top_p": 0.95}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_position_follows_the_target(
    drafter: type[ToyDrafter], config: SpeculationConfig, sampling: dict[str, Any]
) -> None:
    params, draws = SamplingParams(ignore_eos=True, **sampling), 1500
    table = random_table(VOCAB, seed=11)
    engine = ToyEngine(table, config, drafter, seed=3)
    requests = make_requests(draws, PROMPT, NUM_NEW, params)
    engine.run(requests)
    stats = engine.scheduler.stats().speculation
    assert stats is not None and min(stats.accepted[:2]) > 20, "too few drafts are accepted for a meaningful test"
    assert stats.accepted[0] < 0.9 * stats.proposed[0], "too many are"
    chances = np.array([[distribution(logits, params) for logits in row] for row in table])
    outputs = np.array([[*PROMPT[-1:], *request.output_ids] for request in requests])
    for (before, token), joint in zip(pairwise(outputs.T), pair_probabilities(chances)):
        counts = np.zeros((VOCAB, VOCAB))
        np.add.at(counts, (before, token), 1)
        expected = joint * draws
        assert (counts[expected == 0] == 0).all()
        usual = expected >= 5
        pooled = np.append(expected[usual], expected[~usual].sum() + 1e-9)
        seen = np.append(counts[usual], counts[~usual].sum())
        chi_square = ((seen - pooled) ** 2 / pooled)[pooled > 1].sum()
        assert chi_square < limit(int((pooled > 1).sum()) - 1)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("drafter", "config"),
    [(CoupledChain, CHAIN), (FixedChain, CHAIN), (GrownTree, TREE), (RandomTree, TREE)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_draw_for_draw_as_without_drafts(drafter: type[ToyDrafter], config: SpeculationConfig, page_size: int) -> None:
    table = random_table(VOCAB, seed=12)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.1, top_p=0.9)):
        plain, drafted = (make_requests(80, PROMPT, 17, sampling, seed=7) for _ in range(2))
        ToyEngine(table, page_size=page_size).run(plain)
        ToyEngine(table, config, drafter, page_size=page_size).run(drafted)
        assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]


# -- thresholds


def first_drafts(steps: list[Step], drafter: ToyDrafter) -> dict[tuple[int, int, int], list[bool]]:
    """For every step with drafts: (previous token, last token, draft) -> True for each accepted draft, False for each
    rejected one."""
    texts: dict[int, list[int]] = {}
    found: dict[tuple[int, int, int], list[bool]] = {}
    for step in steps:
        texts |= {new.row: list(new.token_ids) for new in step.plan.new_rows}
        drafted = dict(zip(step.plan.rows, step.plan.counts[: step.plan.num_decodes]))
        for row, tokens in zip(step.result.rows, step.result.tokens):
            if drafted.get(row, 1) > 1:
                before, last = texts[row][-2:]
                draft = int(drafter.table[last].argmax())
                found.setdefault((before, last, draft), []).append(len(tokens) > 1)
                assert len(tokens) == 1 or tokens[0] == draft
            texts[row] += tokens
    return found


@pytest.mark.parametrize(
    ("single", "acc"),
    [(1.0, 1.0), (0.5, 0.7), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((1.0, 0.4), (0.3, 1.0)))],
)
def test_thresholds_accept_with_their_probability(single: float, acc: float) -> None:
    params = SamplingParams(temperature=0.9, ignore_eos=True)
    config = SpeculationConfig("standalone", 1, accept_threshold_single=single, accept_threshold_acc=acc)
    table = random_table(VOCAB, seed=13, spread=1.2)
    engine = ToyEngine(table, config, FixedChain, seed=5)
    steps = engine.run(make_requests(400, PROMPT, 30, params))
    chi_square, freedom = 0.0, 0
    assert isinstance(engine.drafter, FixedChain)
    for (before, last, draft), fates in first_drafts(steps, engine.drafter).items():
        p = distribution(table[before, last], params)[draft]
        chance = 1.0 if p >= single else min(1.0, p / acc)
        if chance == 1.0:
            assert all(fates)
        elif len(fates) >= 50 and p > 0:
            chi_square += (sum(fates) - len(fates) * chance) ** 2 / (len(fates) * chance * (1 - chance))
            freedom += 1
    assert freedom >= 10 and chi_square < limit(freedom)


def test_thresholds_change_no_greedy_request_and_siblings_are_independent() -> None:
    """Greedy requests stay exact; two siblings are accepted independently."""
    table = random_table(VOCAB, seed=14)
    lossy = SpeculationConfig("standalone", 3, 2, 6, accept_threshold_single=0.2, accept_threshold_acc=0.2)
    plain, drafted = (make_requests(40, PROMPT, 17, SamplingParams(temperature=0.0)) for _ in range(2))
    ToyEngine(table).run(plain)
    ToyEngine(table, lossy, GrownTree).run(drafted)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    lengths = {}
    for config in (lossy, TREE):
        engine = ToyEngine(table, config, GrownTree)
        engine.run(make_requests(300, PROMPT, 17, SamplingParams(temperature=1.0)))
        stats = engine.scheduler.stats().speculation
        assert stats is not None
        lengths[config] = stats.accept_length
    assert lengths[lossy] > lengths[TREE] + 0.3
