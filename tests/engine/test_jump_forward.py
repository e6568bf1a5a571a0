"""Jump-forward: the tokens are those without jump-forward, and forced tokens need no separate steps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.structured_output.backend import GrammarSettings
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from moe_engine.types.constraint import Constraint
from tests.engine.harness import InProcessEngine, Scripted
from tests.engine.test_failed_steps import Poisoned
from tests.structured_output.schemas import draw_schemas


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    flags: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "max_running_requests": 16, "page_size": 4}
    engine = InProcessEngine(
        CHECKPOINT_DIR, tmp_path_factory.mktemp("status") / "status", max_total_tokens=8192, **flags
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(CHECKPOINT_DIR))


@pytest.fixture(scope="module")
def grammars(engine: InProcessEngine, tokenizer: Tokenizer) -> GrammarCompiler:
    eos = tuple(sorted(engine.config.model.eos_token_ids))
    return GrammarCompiler(lambda: open_backend(GrammarSettings(), tokenizer, engine.config.model.vocab_size, eos))


def compiled(grammars: GrammarCompiler, script: list[Scripted]) -> list[Scripted]:
    """The script, with compiled grammars: the turns of a run never wait and would starve the compilation."""
    for item in script:
        if item.resolved:
            grammars.get(Constraint(**item.resolved["constraint"])).exception()
    return script


def constrained(rid: str, kind: str, source: str, **more: Any) -> Scripted:
    return Scripted(
        rid, [random.randrange(300, 1200) for _ in range(random.randint(1, 20))],
        resolved={"constraint": {"kind": kind, "source": source}}, seed=random.getrandbits(40), **more,
    )  # fmt: skip


FIXED = r"The first of several fixed sentences ends here: number [0-9]{2} is drawn, and a fixed sentence ends the text"


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_of_one_request(
    engine: InProcessEngine, grammars: GrammarCompiler, tokenizer: Tokenizer, overlap: bool
) -> None:
    script = compiled(grammars, [constrained("r", "regex", FIXED, max_new_tokens=100)])
    found, steps = [], []
    for jump_forward in (False, True):
        found.append(engine.run(script, overlap=overlap, grammars=grammars, jump_forward=jump_forward)["r"])
        steps.append(engine.scheduler.kv_cache.step)
    saved = engine.scheduler.table.jumps.num_tokens
    assert found[0] == found[1] and found[1].finish is not None and found[1].finish["type"] == "stop"
    assert tokenizer.decode(found[1].token_ids).startswith("The first of several fixed sentences ends here: number ")
    assert steps[0] - steps[1] == saved >= len(found[1].token_ids) // 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_batches(engine: InProcessEngine, grammars: GrammarCompiler, overlap: bool) -> None:
    """Random schemas, free neighbors, limits within forced tokens, aborts, log-probabilities, a pool too small."""
    schemas = draw_schemas(random.randrange(1 << 30), 40)
    script = [
        constrained(
            f"s{i}", "json_schema", json.dumps(schema), arrives=random.randrange(30),
            max_new_tokens=random.choice((1, 5, 17, 60)), sampling={"temperature": random.choice((0.0, 1.5))},
            logprob=random.random() < 0.2,
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    script += [constrained(f"f{i}", "regex", FIXED, max_new_tokens=12 + 8 * i, arrives=0) for i in range(8)]
    script += [Scripted(f"n{i}", [400 + i, 500], max_new_tokens=60, arrives=2 * i) for i in range(6)]
    expected = engine.run(compiled(grammars, script), overlap=overlap, grammars=grammars)
    assert engine.scheduler.table.jumps.num_tokens > 50
    plain = engine.run(script, overlap=overlap, grammars=grammars, jump_forward=False)
    small = engine.run(script, overlap=overlap, grammars=grammars, num_slots=96, schedule_conservativeness=0.01)
    assert sum(answer.retractions for answer in small.values()) > 0
    for answers in (plain, small):
        for rid, answer in answers.items():
            same = expected[rid]
            assert (answer.token_ids, answer.finish) == (same.token_ids, same.finish), rid
            assert len(answer.logprobs) == len(same.logprobs)
    aborted = [*script, *(constrained(f"a{i}", "regex", FIXED, max_new_tokens=90, aborted_at=20 + i) for i in range(6))]
    engine.run(aborted, overlap=overlap, grammars=grammars)  # the run checks the pool


def test_failed_steps_with_jumps(
    engine: InProcessEngine, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that raise at a forced token: its request ends with 500, the others get the tokens of a run without it."""
    script = [constrained(f"f{i}", "regex", FIXED, max_new_tokens=60, arrives=2 * i) for i in range(5)]
    expected = engine.run(compiled(grammars, script), grammars=grammars)
    poisoned = Poisoned(engine.worker.runner)
    poisoned.positions["f2"] = len(script[2].prompt_ids) + random.randint(2, 8)
    monkeypatch.setattr(engine.worker.runner, "_launch", poisoned)
    found = engine.run(script, grammars=grammars)
    assert poisoned.failures > 0 and engine.scheduler.table.jumps.num_tokens > 10
    for rid, answer in found.items():
        if rid == "f2":
            assert answer.finish is not None and answer.finish["status_code"] == 500
            assert expected[rid].token_ids[: len(answer.token_ids)] == answer.token_ids
        else:
            assert (answer.token_ids, answer.finish) == (expected[rid].token_ids, expected[rid].finish), rid
