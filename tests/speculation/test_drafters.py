"""Drafters with a model must pass it the correct context, also after rejections, chunks, sharing and retractions:
drafts of an exact model are then always accepted. The toy models check the contents of their KV caches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_engine.types import Request, SamplingParams, SpeculationConfig
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint
from tests.speculation.agreeing import agreeing_checkpoint
from tests.speculation.toy_engine import (
    MakeDrafter,
    ToyEngine,
    exact_mtp,
    exact_standalone,
    make_requests,
    random_table,
)

VOCAB = 6
LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "retracted": {"num_slots": 96, "max_rows": 12, "schedule_conservativeness": 0.0, "clip_max_new_tokens": 1}
    | {"retract_decode_steps": 1},
}
CHAINS = [(1, 1, "plain", 0.0), (2, 4, "cut", 1.0), (4, 1, "retracted", 0.0), (4, 4, "retracted", 1.0)]
"""Depth, page size, limits, temperature."""
TREES = [
    (2, 2, 0, "plain", 1.0),
    (4, 2, 12, "cut", 0.0),
    (3, 4, 9, "retracted", 1.0),
    (4, 4, 6, "retracted", 0.0),
    (2, 4, 3, "cut", 1.0),
]
"""Depth, width, nodes (0: all), limits, temperature."""
MAKERS = {"standalone": exact_standalone, "mtp 1": exact_mtp(1), "mtp 2": exact_mtp(2), "mtp 3": exact_mtp(3)}


def requests_of(seed: int, temperature: float) -> list[Request]:
    """Some prompts share a prefix; all requests arrive at once."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 14).tolist()
    sampling = SamplingParams(temperature=temperature)
    found = []
    for i in range(40):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 8))).tolist()
        prompt = shared[: int(rng.integers(0, 15))] + own
        found += make_requests(1, prompt, int(rng.integers(1, 16)), sampling, seed=i)
        found[-1].rid = f"r{i}"
    return found


def method_of(name: str) -> str:
    return "nextn" if name.startswith("mtp") else name


def run(make: MakeDrafter, config: SpeculationConfig, page_size: int, limits: str, temperature: float) -> ToyEngine:
    """Checks the tokens against those without drafts. Returns the engine, for its statistics."""
    table = random_table(VOCAB, seed=page_size)
    engine = ToyEngine(table, config, make, page_size=page_size, **LIMITS[limits])
    plain, drafted = requests_of(page_size, temperature), requests_of(page_size, temperature)
    ToyEngine(table, page_size=page_size).run(plain)
    engine.run(drafted)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    if limits == "retracted":
        assert engine.scheduler.stats().num_retractions_total > 0
    return engine


@pytest.mark.each_value
@pytest.mark.parametrize(("depth", "page_size", "limits", "temperature"), CHAINS)
@pytest.mark.parametrize("name", MAKERS)
def test_exact_chains_are_always_accepted(
    name: str, depth: int, page_size: int, limits: str, temperature: float
) -> None:
    config = SpeculationConfig(method_of(name), depth)
    stats = run(MAKERS[name], config, page_size, limits, temperature).scheduler.stats().speculation
    assert stats is not None and stats.accepted == stats.proposed and min(stats.accepted) > 0


@pytest.mark.each_value
@pytest.mark.parametrize(("depth", "topk", "nodes", "limits", "temperature"), TREES)
@pytest.mark.parametrize("name", MAKERS)
def test_exact_trees_contain_the_next_tokens(
    name: str, depth: int, topk: int, nodes: int, limits: str, temperature: float
) -> None:
    """Within the number of nodes: the next token is among the best, not always the best."""
    config = SpeculationConfig(method_of(name), depth, topk, nodes)
    stats = run(MAKERS[name], config, 4, limits, temperature).scheduler.stats().speculation
    assert stats is not None and stats.accepted[0] == stats.proposed[0]
    assert stats.accepted[1] > 0.8 * stats.proposed[1] or 0 < nodes < 7


@pytest.mark.parametrize("name", MAKERS)
def test_two_requests_of_one_row_are_independent(name: str) -> None:
    """Rows are reused; a drafter's state of the previous request is dropped."""
    config = SpeculationConfig(method_of(name), 3)
    engine = ToyEngine(random_table(VOCAB, seed=5), config, MAKERS[name], max_rows=1, disable_radix_cache=True)
    requests = [dataclasses.replace(r, rid=f"{i}") for i, r in enumerate(requests_of(9, 0.0))]
    engine.run(requests)
    stats = engine.scheduler.stats().speculation
    assert stats is not None and stats.accepted == stats.proposed


@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (2, 11)])
def test_drafts_of_the_target_itself_are_accepted(tmp_path: Path, topk: int, nodes: int) -> None:
    """With real layers: only the order of summation differs, and trees lack some nodes."""
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", seed=topk)
    engine = InProcessEngine(
        path, tmp_path / "board", dtype="float32", max_total_tokens=2048, max_running_requests=8, cpu_threads=1,
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(path), speculative_num_steps=3,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes,
    )  # fmt: skip
    rng = np.random.default_rng(topk)
    script = [
        Scripted(
            f"r{i}", rng.integers(0, 250, 20).tolist(), 20, arrives=i, seed=i,
            sampling={"temperature": i % 2, "ignore_eos": True},
        )
        for i in range(8)
    ]  # fmt: skip
    engine.run(script)
    engine.close()
    stats = engine.scheduler.stats().speculation
    assert stats is not None and stats.accepted[0] >= stats.proposed[0] - 1
    assert sum(stats.accepted) > (0.98 if topk == 1 else 0.8) * sum(stats.proposed)


def test_a_draft_model_without_weights(tmp_path: Path) -> None:
    """With random weights the folders of model and draft model have a config alone."""
    path = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=1)
    for file in path.glob("*.safetensors"):
        file.unlink()
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    engine = InProcessEngine(
        path, tmp_path / "board", load_format="dummy", speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(path), max_total_tokens=64, context_length=32, **flags,
    )  # fmt: skip
    try:
        answers = engine.run([Scripted("r", [3, 4, 5], 6, sampling={"temperature": 0.0, "ignore_eos": True})])
    finally:
        engine.close()
    assert len(answers["r"].token_ids) == 6
    stats = engine.scheduler.stats().speculation
    assert stats is not None and stats.accepted[0] >= stats.proposed[0] - 1, "one seed: both have the same weights"
