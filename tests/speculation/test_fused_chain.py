"""A chain drafted in one kernel call, and a fused step, equal those of separate calls: draft for draft, token for
token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.parallel.recording.merge import unpack_counts
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint


def _script(num_requests: int, temperature: float) -> list[Scripted]:
    generator = torch.Generator().manual_seed(11)
    return [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=torch.randint(20, 250, (5 + 3 * i,), generator=generator).tolist(),
            max_new_tokens=24,
            arrives=2 * i,
            sampling={"temperature": temperature, "top_p": 0.9, "ignore_eos": True},
            seed=i,
        )
        for i in range(num_requests)
    ]


class Ways:
    """An engine with fused steps (`whole`), with fused chains (`chain`), or with separate calls (`parts`)."""

    def __init__(self, path: Path, folder: Path, dtype: str, **flags: Any) -> None:
        settings = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
        self.engine = InProcessEngine(
            path,
            folder / "board",
            dtype=dtype,
            cpu_threads=1,
            max_total_tokens=2048,
            max_running_requests=8,
            speculative_algorithm="NEXTN",
            **settings | flags,
        )
        self._step = self.engine.worker.runner.speculation
        self._layers = self._step.drafter.layers
        self._fused_step, self._fused = self._step._fused, self._layers._fused
        self.num_fused_steps = 0
        if self._fused_step is not None:
            run = self._fused_step.run
            self._fused_step.run = lambda *args: self._count() or run(*args)

    def _count(self) -> None:
        self.num_fused_steps += 1

    def run(self, way: str, script: list[Scripted]) -> tuple[list[Any], list[int], list[int]]:
        """Tokens and log-probabilities of each answer, and proposed and accepted drafts by position."""
        self._step._fused = self._fused_step if way == "whole" else None
        self._layers._fused = None if way == "parts" else self._fused
        answers = self.engine.run(script).values()
        stats = self.engine.scheduler.stats().speculation
        return [(answer.token_ids, answer.logprobs) for answer in answers], stats.proposed, stats.accepted


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ways]:
    ways = Ways(CHECKPOINT_DIR, tmp_path, request.param)
    try:
        if not ways._layers.fuses_drafts:
            pytest.skip("no kernel here drafts whole chains (no C++ compiler)")
        yield ways
    finally:
        ways.engine.close()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("demo", ["bfloat16", "float32"], indirect=True)
def test_the_same_drafts(demo: Ways) -> None:
    for temperature in (0.0, 0.8):
        script = _script(5, temperature)
        before = demo.num_fused_steps
        whole, chain, parts = (demo.run(way, script) for way in ("whole", "chain", "parts"))
        assert whole == chain == parts
        assert demo.num_fused_steps > before, "no step was run whole"
        assert whole[2][0] > 0, "no draft was accepted: the comparison is not meaningful"
        plain = [answer.token_ids for answer in demo.engine.run(script, speculation=None).values()]
        exact = demo.engine.config.dtype == "float32"
        assert not exact or [tokens for tokens, _ in whole[0]] == plain, "drafts changed an answer"


def test_steps_in_one_call_are_recorded(tmp_path: Path) -> None:
    """Steps stay fused, and the model's passes are counted as with separate calls."""
    ways = Ways(CHECKPOINT_DIR, tmp_path, "float32", expert_distribution_recorder_mode="stat")
    try:
        if not ways._layers.fuses_drafts:
            pytest.skip("no kernel here drafts whole chains (no C++ compiler)")
        found = []
        for way in ("whole", "parts"):
            ways.engine.worker.run_call("start_experts").result()
            before = ways.num_fused_steps
            answers = ways.run(way, _script(3, 0.8))
            assert (ways.num_fused_steps > before) == (way == "whole")
            part = ways.engine.worker.run_call("dump_experts").result()
            counts = unpack_counts(part)
            assert part["pass_ids"] == list(range(part["pass_ids"][0], part["pass_ids"][0] + len(counts)))
            assert counts.any(axis=(1, 2)).all(), "a pass without a choice"
            found.append((answers, counts.tolist()))
            ways.engine.worker.run_call("stop_experts").result()
        assert found[0] == found[1]
    finally:
        ways.engine.close()


@pytest.mark.parametrize("demo", ["float32"], indirect=True)
def test_steps_with_further_features_are_not_fused(demo: Ways) -> None:
    """Log-probabilities, penalties, end tokens among drafts: steps with unsupported features are not fused."""
    asked = _script(6, 0.7)
    asked[0].logprob = True
    asked[1].sampling |= {"frequency_penalty": 0.5}
    free = [token for tokens, _ in demo.run("parts", _script(6, 0.7))[0] for token in tokens[3:5]]
    asked[2].sampling |= {"ignore_eos": False, "stop_token_ids": free}
    asked[3].sampling |= {"ignore_eos": False, "min_new_tokens": 6, "stop_token_ids": free}
    whole, parts = (demo.run(way, asked) for way in ("whole", "parts"))
    assert whole == parts
    assert demo.num_fused_steps
    assert len(whole[0][2][0]) < 24, "the end token never occurred"


def test_two_mtp_layers(tmp_path: Path) -> None:
    """Two MTP layers: their chain is one call, the step is not."""
    path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=5, num_mtp_layers=2)
    ways = Ways(path, tmp_path, "float32")
    try:
        if not ways._layers.fuses_drafts:
            pytest.skip("no kernel here drafts whole chains (no C++ compiler)")
        for temperature in (0.0, 0.8):
            whole, chain, parts = (ways.run(way, _script(5, temperature)) for way in ("whole", "chain", "parts"))
            assert whole == chain == parts
        assert not ways.num_fused_steps
    finally:
        ways.engine.close()
