"""Qwen3-Next in whole engines: tokens and log-probabilities equal transformers', with cached prefixes, chunks,
retractions and reused rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.executor.make_worker import worker_options
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.weight_read import ReadArgs, WeightRead
from tests.engine.harness import InProcessEngine, Scripted
from tests.engine.test_states import check
from tests.models.checkpoints import make_checkpoint

VOCAB, ROWS = 250, 5
RETRACTIONS, CACHED = attrgetter("retractions"), attrgetter("cached_tokens")
MOST_DRAWS = 4
"""Max scripts until one has both; most have."""
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 320, "max_running_requests": ROWS, "chunked_prefill_size": 32,
    "max_mamba_cache_size": 2 * ROWS, "mamba_track_interval": 8,
}  # fmt: skip


class KnownTexts:
    """`Drafter.propose` from the texts of an earlier run, with some wrong tokens."""

    def __init__(self, history: TokenBuffer, texts: list[list[int]], rng: random.Random) -> None:
        self.history, self.texts, self.rng = history, texts, rng

    def propose(self, task: DraftTask) -> Drafts:
        drafts = torch.full((len(task.rows), task.depth), -1)
        for own, row, length in zip(drafts, task.rows.tolist(), task.lengths.tolist()):
            text = self.history.tokens[row, : length + 1].tolist()
            known = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])[: task.depth]
            known = [token if self.rng.random() < 0.7 else self.rng.randrange(VOCAB) for token in known]
            own[: len(known)] = torch.tensor(known, dtype=torch.int64)
        return Drafts(torch.cat((task.roots[:, None], drafts), 1))


MTP: dict[str, Any] = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip


@pytest.fixture(scope="module", params=[{}, MTP], ids=["plain", "drafts"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessEngine, torch.nn.Module]]:
    import transformers

    path = make_checkpoint("qwen3_next", tmp_path_factory.mktemp("model"), random.randrange(2**31), num_mtp_layers=1)
    engine = InProcessEngine(path, tmp_path_factory.mktemp("status") / "status", **FLAGS | request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    yield engine, model.eval()
    engine.close()


def make_script(rng: random.Random, count: int) -> list[Scripted]:
    """Conversations: a prompt begins with a common head, or with the whole prompt of another request."""
    heads = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    script: list[Scripted] = []
    for i in range(count):
        head = rng.choice(heads)[: rng.choice([13, 40])]
        if script and i % 3 == 2:
            head = script[-1].prompt_ids[:120]
        prompt = head + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 33, 50]))]
        if i < ROWS:  # these do not fit into the pool together
            prompt = [rng.randrange(VOCAB) for _ in range(31)]
        script.append(
            Scripted(
                f"r{i}",
                prompt,
                max_new_tokens=60 if i < ROWS else rng.choice([1, 8, 20, 50]),
                arrives=0 if i < ROWS else rng.randrange(80),
                aborted_at=rng.randrange(20, 60) if i % 8 == 7 else None,
                sampling={"temperature": 0.0, "ignore_eos": True},
                logprob=True,
            )
        )
    return script


@pytest.mark.each_value
@pytest.mark.parametrize("scheduling", [{}, {"enable_mixed_chunk": True}, {"overlap": False}], ids=str)
def test_answers_equal_transformers(served: Any, scheduling: dict[str, Any]) -> None:
    engine, model = served
    for _ in range(MOST_DRAWS):
        script = make_script(random.Random(random.randrange(2**31)), 4 * ROWS)
        answers = engine.run(script, schedule_conservativeness=0.0, **scheduling)
        for item in script:
            got = answers[item.rid]
            assert item.aborted_at or len(got.token_ids) == item.max_new_tokens
            if got.token_ids:
                own = [entry.logprob for entry in got.logprobs]
                check(model, item.prompt_ids, got.token_ids, own, item.rid, tolerance=5e-4)
        if all(any(of(answer) for answer in answers.values()) for of in (RETRACTIONS, CACHED)):
            return
    pytest.fail("no script had both a retraction and a cached prefix")


def test_accepted_and_rejected_drafts(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after the last accepted draft is kept, also if none or all are accepted."""
    engine, model = served
    speculation = engine.worker.runner.speculation
    if speculation is None:
        pytest.skip("without drafts")
    seed = random.randrange(2**31)
    script = [item for item in make_script(random.Random(seed), 2 * ROWS) if item.aborted_at is None]
    first = engine.run(script)
    texts = [item.prompt_ids + first[item.rid].token_ids for item in script]
    known = KnownTexts(engine.worker.runner.rows.history, texts, random.Random(seed))
    monkeypatch.setattr(speculation.drafter, "propose", known.propose)
    answers = engine.run(script, schedule_conservativeness=0.0, enable_mixed_chunk=True)
    drafts = engine.scheduler.stats().speculation
    assert 20 < sum(drafts.accepted) < sum(drafts.proposed) - 20
    for item in script:
        got = answers[item.rid]
        assert len(got.token_ids) == item.max_new_tokens
        check(model, item.prompt_ids, got.token_ids, [entry.logprob for entry in got.logprobs], item.rid)


def test_the_ledger_has_the_bytes_of_the_pools(served: Any) -> None:
    engine, _ = served
    ledger, runner = engine.config.ledger, engine.worker.runner
    assert runner.rows.states.num_bytes == ledger.bytes_of("request states") > 0
    assert runner.kv_pool.num_bytes == ledger.kv_bytes


@pytest.mark.parametrize("name", ["model.layers.0.linear_attn.conv1d.weight", "model.layers.0.input_layernorm.weight"])
def test_weights_by_name_are_those_of_the_checkpoint(served: Any, name: str) -> None:
    """Convolution taps are stored in another order, norms with 1 added."""
    engine, _ = served
    if engine.worker.runner.speculation is not None:
        pytest.skip("the same weights")
    stored = load_file(f"{engine.config.model_path}/model.safetensors")[name]
    found = WeightRead(engine.worker.runner, worker_options(engine.config), engine.worker.experts).read(
        ReadArgs(name, 10)
    )
    values = torch.zeros(stored[:10].numel())
    values[torch.frombuffer(bytearray(found["numbers"]), dtype=torch.int64)] = torch.frombuffer(
        bytearray(found["values"]), dtype=torch.float32
    )
    assert found["shape"] == [min(10, stored.shape[0]), *stored.shape[1:]]
    torch.testing.assert_close(values, stored[:10].flatten(), rtol=1e-6, atol=1e-6)
