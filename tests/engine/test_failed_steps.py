"""A real worker whose steps fail for some requests: these end with 500, and all others get unchanged tokens and
log-probabilities, for any change that a failed step made to the worker before it raised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.core.step_reporter import StepReporter
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.types import StepPlan
from tests.engine.harness import Answer, InProcessEngine, Scripted, ScriptedPort
from tests.speculation.agreeing import agreeing_checkpoint

VOCAB = 250
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"speculative_algorithm": "NEXTN"},
    "tree": {
        "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 4,
    },
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
}  # fmt: skip


class Poisoned:
    """Wraps a runner's `_launch`. Steps that compute a position of a poisoned request raise; every second one after its
    execution, when rows, KV and sampling have changed."""

    def __init__(self, runner: Any) -> None:
        self._launch, self._history = runner._launch, runner.rows.history
        self.positions: dict[str, int] = {}
        self.failures = 0
        self._rids: dict[int, str] = {}

    def __call__(self, plan: StepPlan) -> Any:
        self._rids.update({new.row: new.rid for new in plan.new_rows})
        if not any(self._is_reached(plan, i) for i in range(len(plan.rows))):
            return self._launch(plan)
        self.failures += 1
        if self.failures % 2:
            self._launch(plan)
        raise RuntimeError("no kernel for this token")

    def _is_reached(self, plan: StepPlan, i: int) -> bool:
        position, start = self.positions.get(self._rids[plan.rows[i]]), plan.starts[i]
        if i < plan.num_decodes and self._history is not None:  # the plan's start is a lower bound
            start = int(self._history.read_lengths(np.array([plan.rows[i]]))[0])
        return position is not None and start <= position < start + plan.counts[i]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return agreeing_checkpoint("deepseek_v3", folder / "model", random.randrange(2**31), num_mtp_layers=1)


@pytest.fixture(scope="module", params=DRAFTS)
def engine(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(
        checkpoint,
        tmp_path_factory.mktemp("status") / "status",
        dtype="float32",
        max_total_tokens=2048,
        max_running_requests=12,
        chunked_prefill_size=32,
        **DRAFTS[request.param],
    )
    yield engine
    engine.close()


def make_script(rng: random.Random, count: int) -> list[Scripted]:
    """Greedy and sampled, with penalties, log-probabilities of answers and prompts, and a common prefix."""
    prefix = [rng.randrange(VOCAB) for _ in range(20)]
    script = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        sampling: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "top_p": 0.9}
        if i % 3 == 0:
            sampling |= {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
        script.append(
            Scripted(
                f"r{i}",
                prefix + prompt if i % 4 < 2 else prompt,
                max_new_tokens=rng.randint(1, 30),
                arrives=rng.randint(0, 12),
                sampling={**sampling, "ignore_eos": True},
                seed=rng.getrandbits(40),
                logprob=True,
                logprob_start=rng.choice([None, None, 0, len(prompt) // 2]),
            )
        )
    return script


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.each_value
def test_other_requests_keep_their_tokens_after_a_failed_step(
    engine: InProcessEngine, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(random.randrange(1 << 30))
    script = make_script(rng, 14)
    expected = engine.run(script, overlap=overlap)
    poison = Poisoned(engine.worker.runner)
    monkeypatch.setattr(engine.worker.runner, "_launch", poison)
    for item in rng.sample(script, 3):  # drafts extend beyond the end, so a position there may count or not
        prompt, last = len(item.prompt_ids), len(item.prompt_ids) + item.max_new_tokens - 2
        poison.positions[item.rid] = rng.choice([prompt - 1, min(prompt, last), rng.randint(prompt - 1, last)])
    found = engine.run(script, overlap=overlap)
    reached = set(poison.positions)
    assert {rid for rid, answer in found.items() if _status(answer) == 500} == reached
    assert poison.failures >= 2 * len(reached)
    for item in script:
        got, want = found[item.rid], expected[item.rid]
        if item.rid in reached:
            assert "no kernel for this token" in got.finish["message"]  # type: ignore[index]
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            continue
        assert (got.token_ids, got.finish) == (want.token_ids, want.finish), item.rid
        assert _numbers(got.logprobs) == pytest.approx(_numbers(want.logprobs), abs=1e-4)
        assert _numbers(got.prompt_logprobs) == pytest.approx(_numbers(want.prompt_logprobs), abs=1e-4)


def _status(answer: Answer) -> int | None:
    return answer.finish.get("status_code") if answer.finish is not None else None


def _numbers(entries: list[Any]) -> list[float]:
    return [entry[1] for entry in entries if entry[1] is not None]


class Broken:
    """A worker whose steps all fail."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        raise RuntimeError("the device is broken")


def test_broken_device_stops_the_engine(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken()
    monkeypatch.setattr(engine.worker.runner, "_launch", broken)
    script = [Scripted(f"r{i}", [1 + i] * 5, 5) for i in range(6)]
    with pytest.raises(
        RuntimeError, match=r"consecutive steps .* one-token probe: step \d+ failed.*the device is broken"
    ):
        engine.run(script)
    assert len(broken.plans) < 12


def test_a_plan_that_is_too_large_never_reaches_the_worker(engine: InProcessEngine, tmp_path: Path) -> None:
    """The plan is refused before any rank starts it, and treated as a failed step."""
    script = [Scripted(f"r{i}", [1 + i] * 40, 4, sampling={"temperature": 0.0}) for i in range(4)]
    expected = engine.run(script)
    port, seen = ScriptedPort(script), []
    config = replace(engine.scheduler.config, max_step_tokens=None, chunked_prefill_size=-1)
    core = EngineCore(
        Scheduler(config),
        engine.worker,
        port,
        engine._status,
        StepReporter(),
        LoopSettings(
            frozenset(engine.config.model.eos_token_ids),
            problem_of=lambda plan: seen.append(plan.num_tokens) or ("too large" if plan.num_tokens > 60 else None),
        ),
    )
    core.run()
    assert max(seen) > 60
    for rid, answer in port.answers.items():
        assert answer.token_ids == expected[rid].token_ids
