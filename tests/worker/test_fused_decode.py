"""Decodes in one kernel call give the tokens of separate calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import StepError
from moe_engine.parallel.recording.merge import unpack_counts
from moe_engine.types import NewRow, SamplingParams, StepPlan
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint

NUM_NEW = 24


class Ways:
    """An engine whose decodes run in one call, or in separate calls."""

    def __init__(self, path: Path, folder: Path, **flags: Any) -> None:
        settings = {"cpu_threads": 1, "max_total_tokens": 2048, "max_running_requests": 8}
        self.engine = InProcessEngine(path, folder / "board", **settings | flags)
        self.runner = self.engine.worker.runner
        self.fused = self.runner.fused
        self.num_fused = 0
        if self.fused is not None:
            run = self.fused.run
            self.fused.run = lambda plan: self._count() or run(plan)  # type: ignore[method-assign]

    def _count(self) -> None:
        self.num_fused += 1

    def run(self, fused: bool, script: list[Scripted]) -> list[Any]:
        """Tokens and log-probabilities of each answer."""
        self.runner.fused = self.fused if fused else None
        return [(answer.token_ids, answer.logprobs) for answer in self.engine.run(script).values()]


def _script(temperature: float, count: int = 5) -> list[Scripted]:
    """Requests that arrive beside decodes of others, two of them with a common prefix."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(20, 250, (5 + 3 * i,), generator=generator).tolist() for i in range(count)]
    prompts[1] = prompts[0] + prompts[1]
    return [
        Scripted(
            rid=f"r{i}-", prompt_ids=prompt, max_new_tokens=NUM_NEW, arrives=2 * i, seed=i,
            sampling={"temperature": temperature, "top_p": 0.9, "ignore_eos": True},
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


MODELS: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "embedded": (None, {}, {"dtype": "bfloat16"}),
    "V3, int4": ("deepseek_v3", {}, {"dtype": "bfloat16", "quantization": "int4"}),
    "embedded, FP8 cache": (None, {}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "V2-Lite": ("deepseek_v2_lite", {}, {"dtype": "float32"}),
    "Qwen3-MoE": ("qwen3_moe", {}, {"dtype": "float32"}),
    "window": ("mistral", {"sliding_window": 7}, {"dtype": "float32"}),
}


@pytest.fixture
def ways(tmp_path: Path) -> Any:
    """Makes engines, and closes them."""
    made: list[Ways] = []

    def make(kind: str | None, fields: dict[str, Any], flags: dict[str, Any]) -> Ways:
        path = CHECKPOINT_DIR if kind is None else make_checkpoint(kind, tmp_path / "model", seed=3, **fields)
        made.append(Ways(path, tmp_path, **flags))
        if made[-1].runner.forward.attention.capabilities.decoder is None:
            pytest.skip("no kernel here runs a decoder in one call (no C++ compiler)")
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def test_steps_without_drafts_of_a_speculating_worker(ways: Callable[..., Ways]) -> None:
    """Its own copy of tokens and lengths follows."""
    engine = ways(None, {}, {"dtype": "float32", "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4})
    history, found = engine.runner.rows.history, []
    assert history is not None
    for fused in (True, False):
        before = engine.num_fused
        engine.runner.fused = engine.fused if fused else None
        answers = engine.engine.run(_script(0.8), speculation=None)
        assert (engine.num_fused > before) == fused
        found.append(([a.token_ids for a in answers.values()], history.lengths.tolist(), history.tokens.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("model", MODELS)
def test_the_same_tokens(model: str, ways: Callable[..., Ways]) -> None:
    engine = ways(*MODELS[model])
    for temperature in (0.0, 0.8):
        script = _script(temperature)
        before = engine.num_fused
        assert engine.run(True, script) == engine.run(False, script)
        assert engine.num_fused - before > NUM_NEW / 2, "few steps ran in one call"


def test_many_requests(ways: Callable[..., Ways]) -> None:
    engine = ways(None, {}, {"dtype": "bfloat16", "max_running_requests": 80, "max_total_tokens": 8192})
    generator = torch.Generator().manual_seed(5)
    script = [
        Scripted(
            rid=f"r{i}-", prompt_ids=torch.randint(20, 250, (3 + i % 4,), generator=generator).tolist(),
            max_new_tokens=8, seed=i, sampling={"temperature": i % 2 * 0.8, "ignore_eos": True},
        )
        for i in range(70)
    ]  # fmt: skip
    assert engine.run(True, script) == engine.run(False, script)
    assert engine.num_fused > 4, "few steps of 70 tokens ran in one call"


def test_steps_with_further_features_are_not_fused(ways: Callable[..., Ways]) -> None:
    """Log-probabilities and penalties; the steps of other requests remain fused."""
    engine = ways(*MODELS["embedded"])
    script = _script(0.7, 3)
    script[0].logprob = True
    script[1].sampling |= {"frequency_penalty": 0.5}
    script[2].max_new_tokens = 3 * NUM_NEW
    fused, parts = engine.run(True, script), engine.run(False, script)
    assert fused == parts
    assert fused[0][1], "no log-probabilities"
    assert 0 < engine.num_fused < 3 * NUM_NEW


def test_fused_steps_are_recorded(ways: Callable[..., Ways]) -> None:
    """Expert choices and numbers of passes are those of separate calls."""
    engine = ways(None, {}, {"dtype": "float32", "expert_distribution_recorder_mode": "stat"})
    found = []
    for fused in (True, False):
        engine.engine.worker.run_call("start_experts").result()
        before = engine.num_fused
        answers = engine.run(fused, _script(0.0, 3))
        assert (engine.num_fused > before) == fused
        part = engine.engine.worker.run_call("dump_experts").result()
        counts = unpack_counts(part)
        assert part["pass_ids"] == list(range(part["pass_ids"][0], part["pass_ids"][0] + len(counts)))
        found.append((answers, counts.tolist()))
        engine.engine.worker.run_call("stop_experts").result()
    assert found[0] == found[1]


def test_a_row_without_room_is_named_and_unchanged(ways: Callable[..., Ways]) -> None:
    engine = ways(*MODELS["embedded"])
    runner, worker = engine.runner, engine.engine.worker
    new = NewRow(2, "long", [5, 6], 2, [], SamplingParams(temperature=0.0), 0, frozenset())
    prompt = StepPlan(1, [2], [0], [2], [True], [16, 17], input_ids=[5, 6], new_rows=[new])
    worker.execute(prompt).result()
    table, last = runner.rows.slot_table.clone(), runner.rows.last_token.clone()
    beyond = StepPlan(2, [2], [runner.rows.width], [1], [True], [18], num_decodes=1)
    with pytest.raises(StepError, match="row 2 grows beyond its table of"):
        worker.execute(beyond).result()
    assert np.array_equal(table.numpy(), runner.rows.slot_table.numpy())
    assert torch.equal(last, runner.rows.last_token)
    assert engine.num_fused


def test_other_steps_take_separate_calls(ways: Callable[..., Ways]) -> None:
    engine = ways(*MODELS["embedded"])
    rows, fused = engine.runner.rows, engine.fused
    assert fused is not None
    plan = StepPlan(1, [1], [4], [1], [True], [16], num_decodes=1)
    assert fused.takes(plan)
    rows.returns_positions.add(1)
    assert not fused.takes(plan)
    rows.returns_positions.clear()
    assert not fused.takes(StepPlan(1, [1], [4], [1], [False], [16], num_decodes=1))
    assert not fused.takes(StepPlan(1, [1], [4], [2], [True], [16, 17], input_ids=[1, 2]))
