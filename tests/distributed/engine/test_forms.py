"""Engines of several ranks give the tokens of one rank: a few cases that cover every pair of settings.

All forms at 2, 4 and 8 ranks, with more requests: ``python -m tests.distributed.engine.all_forms``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from moe_engine.models import step_memory
from tests.distributed.engine.forms import FACTORS, Case, Forms, allowed
from tests.distributed.engine.near_ties import possible_tokens
from tests.speculation.pairwise import pairwise_cover

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(9)]

PLAIN: dict[str, Any] = {name: values[0] for name, values in FACTORS.items()}
FEW: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in PLAIN.items()},
    "attention": ("tp", "dp"),
    "experts": ("cut", "all_to_all", "shared_memory"),
    "lm_head": ("all", "group"),
    "dense": ("cut", "whole"),
    "chunk": (-1, 16),
    "mixed": (False, True),
    "page": (1, 16),
    "radix": (True, False),
    "overlap": (True, False),
    "pool": ("ample", "tiny"),
}
MORE: list[dict[str, Any]] = [
    {"model": "qwen3", "chunk": 16, "pool": "tiny"},
    {"model": "llama", "attention": "dp", "lm_head": "group", "mixed": True, "chunk": 16},
    {"replicas": 2, "pool": "tiny"},
    {"drafts": "ngram", "attention": "dp", "experts": "allgather", "overlapped": "single", "page": 4},
    {"experts": "shared_memory", "overlapped": "two"},
    {"ranks": 4, "attention": "groups of 2", "experts": "all_to_all", "overlapped": "two", "dense": "whole"},
    {"ranks": 4, "attention": "groups of 2", "experts": "ep of 2", "model": "qwen3_moe", "replicas": 1, "page": 16},
]
CASES: list[Case] = pairwise_cover(FEW, allowed, seed=42) + [{**PLAIN, **case} for case in MORE]


@dataclass
class Seen:
    """Effects of the cases so far: retractions of each case with a small pool, and aborted requests of each."""

    retractions: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    seed = random.randrange(1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Forms(tmp_path_factory.mktemp("models"), num_prompts=14, num_tokens=24, seed=seed)


def name_of(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items() if value != PLAIN[name]) or "tp"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_of_one_rank(forms: Forms, seen: Seen, case: Case) -> None:
    outcome = forms.run(case)
    assert not outcome.differences
    assert outcome.problems == []
    seen.aborted.append(outcome.aborted)
    groups = 1 if case["attention"] == "tp" else 2
    assert outcome.used_schedulers == groups * case["replicas"]
    assert (outcome.tokens_drafted > 0) == (case["drafts"] != "none")
    if case["pool"] == "tiny":
        seen.retractions.append(outcome.retractions)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"experts": "ep", "chunk": 16}, marks=pytest.mark.exhaustive),
        {"experts": "all_to_all", "attention": "dp"},
    ],
    ids=name_of,
)
def test_drafting_and_the_models_experts_move_unnoticed(forms: Forms, case: dict[str, Any]) -> None:
    moving = {"enable_eplb": True, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 4}
    outcome = forms.run({**PLAIN, "drafts": "nextn", **case}, **moving)
    assert not outcome.differences and outcome.problems == []
    assert outcome.tokens_drafted > 0 and outcome.rebalances > 0


@pytest.mark.parametrize(
    "case",
    [
        {"attention": "dp", "drafts": "nextn"},
        pytest.param({"chunk": 16, "drafts": "ngram"}, marks=pytest.mark.exhaustive),
    ],
    ids=name_of,
)
def test_few_rows_of_logits_at_once(monkeypatch: pytest.MonkeyPatch, forms: Forms, case: dict[str, Any]) -> None:
    """All ranks call a head of several attention groups as often as the largest group needs."""
    monkeypatch.setattr(step_memory, "MIN_LOGITS_ROWS", 3)
    monkeypatch.setattr(step_memory, "MAX_LOGITS_ROWS", 3)
    outcome = forms.run({**PLAIN, **case})
    assert not outcome.differences and outcome.problems == []


def test_near_ties_are_recognized(forms: Forms) -> None:
    """The oracle of near ties draws the tokens of one rank, and rarely more than one."""
    answers, counts = forms._alone("deepseek_v3"), []
    for want in forms._requests:
        tokens = answers[want.rid].tokens
        for i, token in enumerate(tokens[:2]):
            possible = possible_tokens(forms._folder / "deepseek_v3", want.prompt + tokens[:i], want.sampling)
            assert token in possible, (want.rid, i)
            counts.append(len(possible))
    assert sum(counts) < 1.1 * len(counts)


def test_cases_retracted_and_aborted(seen: Seen) -> None:
    """Checks that the cases contain retractions and aborts. A single case may lack them, depending on the arrival and
    the end of its requests."""
    if len(seen.aborted) < len(CASES):
        pytest.skip("needs all cases before it")
    assert sum(seen.retractions) > 0
    assert sum(seen.aborted) >= len(CASES)
