"""EAGLE, DFlash and DSpark heads give the drafts of an independent float64 reference, and never change an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.eagle_pairs import FLAGS, FORMS, Pair, make_pair

DEPTH = 3
CHAIN = {"speculative_num_steps": DEPTH, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": DEPTH + 1}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


QUICK = ("eagle2 mapped", "eagle3 on mla", "eagle3 on blocks", "eagle3 of three layers", "dflash", "dspark")
"""Each layout, each attention of a head, a token map, a draft vocabulary, several layers, blocks."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(name, tmp_path_factory.mktemp("eagle"))
        return made[name]

    return get


@pytest.fixture(params=["eagle3 on mla", "dspark"])
def trained(pairs: Callable[[str], Pair], request: pytest.FixtureRequest) -> Pair:
    return pairs(request.param)


def script(pair: Pair, temperature: float = 0.0, tokens: int = 24, together: bool = False) -> list[Scripted]:
    sampling = {"temperature": temperature, "ignore_eos": True}
    return [
        Scripted(f"r{i}", prompt, tokens, arrives=0 if together else 2 * i, sampling=sampling, seed=i, logprob=True)
        for i, prompt in enumerate(pair.prompts)
    ]


def run(
    pair: Pair, folder: Path, items: list[Scripted], drafts: bool = True, overlap: bool = True, **flags: Any
) -> tuple[Any, InProcessEngine]:
    engine = InProcessEngine(pair.path, folder, **(pair.flags(**flags) if drafts else {**FLAGS, **flags}))
    try:
        answers = engine.run(items, overlap=overlap)
    finally:
        engine.close()
    return {rid: answer.token_ids for rid, answer in answers.items()}, engine


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in FORMS]
)
def test_acceptance_equals_an_offline_count_and_tokens_those_without_drafts(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pair = pairs(name)
    plain, _ = run(pair, tmp_path / "plain", script(pair), drafts=False)
    # without a step in flight the last steps are known
    drafted, engine = run(pair, tmp_path / "drafted", script(pair), overlap=False, **CHAIN)
    assert drafted == plain
    proposed, accepted = [0] * DEPTH, [0] * DEPTH
    for i, prompt in enumerate(pair.prompts):
        counts = pair.counts(prompt, plain[f"r{i}"], DEPTH)
        proposed = [a + b for a, b in zip(proposed, counts[0])]
        accepted = [a + b for a, b in zip(accepted, counts[1])]
    stats = engine.scheduler.stats().speculation
    assert stats is not None and (stats.proposed, stats.accepted) == (proposed, accepted)
    assert 0 < sum(accepted) < sum(proposed), "acceptance is trivial"


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.5},
    "tree": {"flags": TREE},
    "sampled tree": {"flags": TREE, "temperature": 0.5},
    "auto": {"flags": {"speculative_num_steps": "auto"}},
    "chunks and pages": {"flags": {**CHAIN, "chunked_prefill_size": 8, "enable_mixed_chunk": True, "page_size": 4}},
    "retracted": {"flags": {**CHAIN, "max_total_tokens": 96, "schedule_conservativeness": 0.0}, "together": True},
}

OFTEN = ("sampled tree", "retracted")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.exhaustive) for way in WAYS]
)
def test_answers_are_those_without_drafts(trained: Pair, tmp_path: Path, way: str) -> None:
    options = WAYS[way]
    if "tree" in way and trained.head.form.algorithm == "DSPARK":
        pytest.skip("blocks are chains")
    items = [
        script(trained, options.get("temperature", 0.0), together=options.get("together", False)) for _ in range(2)
    ]
    plain, _ = run(trained, tmp_path / "plain", items[0], drafts=False)
    drafted, engine = run(trained, tmp_path / "drafted", items[1], **options.get("flags", CHAIN))
    stats = engine.scheduler.stats()
    assert drafted == plain
    assert stats.speculation is not None and sum(stats.speculation.accepted) > 0
    assert way != "retracted" or stats.num_retractions_total > 0


@pytest.mark.drawn(2)
def test_a_cached_prefix_has_the_heads_keys_and_values(trained: Pair, tmp_path: Path) -> None:
    """A repeated request reads the head's KV from the radix cache, and has the same number of accepted drafts."""
    prompt = trained.prompts[-1] * 2
    items = [Scripted(f"r{i}", prompt, 20, arrives=200 * i, seed=1, logprob=True) for i in range(2)]
    answers: dict[str, Any] = {}
    engine = InProcessEngine(trained.path, tmp_path / "engine", **trained.flags(**CHAIN))
    try:
        answers = engine.run(items, overlap=False)
    finally:
        engine.close()
    assert answers["r1"].cached_tokens > len(prompt) // 2
    assert answers["r1"].token_ids == answers["r0"].token_ids
    stats = engine.scheduler.stats().speculation
    assert stats is not None and all(count % 2 == 0 for count in (*stats.proposed, *stats.accepted))


@pytest.mark.drawn(2)
def test_the_host_tier_keeps_the_heads_keys_and_values(trained: Pair, tmp_path: Path) -> None:
    """A prompt whose KV was evicted and loaded again has the same number of accepted drafts as a recomputed one."""
    prompt = trained.prompts[-1] * 2
    fillers = [[token % 250 for token in range(7 * i, 7 * i + 70)] for i in range(1, 4)]
    sampling = {"temperature": 0.0, "ignore_eos": True}
    prompts = [prompt, *fillers, prompt]
    items = [Scripted(f"r{i}", p, 16, arrives=200 * i, sampling=sampling) for i, p in enumerate(prompts)]
    limits = {"max_total_tokens": 160, "context_length": 96, "max_running_requests": 2, "hicache_ratio": 4}
    found = []
    for tier in ({"disable_radix_cache": True}, {"enable_hierarchical_cache": True}):
        engine = InProcessEngine(trained.path, tmp_path / str(len(found)), **trained.flags(**CHAIN, **limits, **tier))
        try:
            answers = engine.run(items, overlap=False)
        finally:
            engine.close()
        stats = engine.scheduler.stats()
        found.append(({rid: answer.token_ids for rid, answer in answers.items()}, stats.speculation))
    assert answers["r4"].cached_tokens > len(prompt) // 2 and stats.host_hit_tokens_total > 0
    assert found[0] == found[1]
