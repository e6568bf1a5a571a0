"""The whole engine over models with a state for each request: tokens and log-probabilities equal a recomputation of the
whole text in float64, with chunks, reused rows, retractions, aborts and failed steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_engine.models import registry
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.engine.test_failed_steps import Poisoned
from tests.models import ema
from tests.models.routing import routed_logits

VOCAB = 250
ROWS = 6
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 300, "max_running_requests": ROWS, "chunked_prefill_size": 32,
}  # fmt: skip
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    known = dict(registry._architectures)
    ema.register()
    yield
    registry._architectures.clear()
    registry._architectures.update(known)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def served(
    request: Any, registered: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InProcessEngine, torch.nn.Module]]:
    path = ema.make_ema_checkpoint(request.param, tmp_path_factory.mktemp("model"), random.randrange(2**31))
    engine = InProcessEngine(path, tmp_path_factory.mktemp("status") / "status", **FLAGS)
    yield engine, ema.reference(path)
    engine.close()


def make_script(rng: random.Random, count: int) -> list[Scripted]:
    """Prompts shorter and longer than a chunk, some with common prefixes. The first requests fill all rows and do not
    fit into the pool together. Some are aborted."""
    shared = [rng.randrange(VOCAB) for _ in range(160)]
    script = []
    for i in range(count):
        length = 31 if i < ROWS else rng.choice([1, 2, 3, 31, 32, 33, 70, 150])
        script.append(
            Scripted(
                f"r{i}",
                shared[:length] if i % 3 == 0 else [rng.randrange(VOCAB) for _ in range(length)],
                max_new_tokens=60 if i < ROWS else rng.choice([1, 30, 60]),
                arrives=0 if i < ROWS else rng.randrange(30),
                aborted_at=rng.randrange(30, 60) if i % 6 == 5 else None,
                sampling={"temperature": 0.0, "ignore_eos": True},
                logprob=True,
                logprob_start=0 if i % 4 == 0 else None,
            )
        )
    return script


def check(
    model: torch.nn.Module, prompt: list[int], tokens: list[int], logprobs: list[float], where: str = "",
    tolerance: float = TOLERANCE,
) -> None:  # fmt: skip
    """Each token is the reference's best one, with its log-probability."""
    logits, clear = routed_logits(model, prompt + tokens[:-1])
    count = max(0, clear - len(prompt) + 1)
    scores = logits[len(prompt) - 1 :].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:count, 0]
    assert chosen.tolist() == pytest.approx(scores[:count].max(-1).values.tolist(), abs=1e-5), where
    assert logprobs[:count] == pytest.approx(chosen.tolist(), abs=tolerance), where


def check_answer(model: torch.nn.Module, item: Scripted, answer: Answer) -> None:
    if answer.token_ids:
        check(model, item.prompt_ids, answer.token_ids, [entry.logprob for entry in answer.logprobs], item.rid)
    if item.logprob_start == 0 and item.aborted_at is None:
        logits, count = routed_logits(model, item.prompt_ids)
        scores = logits.log_softmax(-1)
        wanted = [float(scores[i, token]) for i, token in enumerate(item.prompt_ids[1:])]
        found = [entry.logprob for entry in answer.prompt_logprobs[1:]]
        assert len(found) == len(wanted)
        assert found[:count] == pytest.approx(wanted[:count], abs=TOLERANCE), item.rid


@pytest.mark.each_value
@pytest.mark.parametrize(
    "scheduling", [{}, {"enable_mixed_chunk": True}, {"overlap": False, "chunked_prefill_size": 7}], ids=str
)
def test_answers_equal_a_recomputation(served: Any, scheduling: dict[str, Any]) -> None:
    """Chunks, rows of earlier requests, retractions (the pool is small and filled greedily) and aborts."""
    engine, model = served
    script = make_script(random.Random(random.randrange(2**31)), 3 * ROWS)
    answers = engine.run(script, schedule_conservativeness=0.0, **scheduling)
    assert any(answer.retractions for answer in answers.values())
    for item in script:
        assert item.aborted_at or len(answers[item.rid].token_ids) == item.max_new_tokens
        check_answer(model, item, answers[item.rid])


def test_the_ledger_has_the_bytes_of_the_pools(served: Any) -> None:
    engine, _ = served
    ledger, runner = engine.config.ledger, engine.worker.runner
    assert runner.rows.states.num_bytes == ledger.bytes_of("request states") > 0
    assert runner.kv_pool.num_bytes == ledger.kv_bytes


def test_a_request_alone(served: Any) -> None:
    engine, model = served
    item = Scripted("alone", [random.randrange(VOCAB) for _ in range(100)], 40, logprob=True, logprob_start=0)
    item.sampling["ignore_eos"] = True
    check_answer(model, item, engine.run([item])["alone"])


def test_other_requests_keep_their_states_after_a_failed_step(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second failed step has already stored its states."""
    engine, model = served
    rng = random.Random(random.randrange(2**31))
    script = [item for item in make_script(rng, ROWS) if item.aborted_at is None]
    poison = Poisoned(engine.worker.runner)
    monkeypatch.setattr(engine.worker.runner, "_launch", poison)
    bad = rng.choice(script)
    poison.positions[bad.rid] = len(bad.prompt_ids) - 1 + rng.randrange(bad.max_new_tokens)
    answers = engine.run(script)
    assert poison.failures >= 2
    for item in script:
        if item is not bad:
            assert len(answers[item.rid].token_ids) == item.max_new_tokens
            check_answer(model, item, answers[item.rid])
