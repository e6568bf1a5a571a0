"""Late masks: a step is launched, and sampled after the masks of its rows have arrived.

The oracle takes log-probabilities of an unmasked request with the same text, and the best of the tokens that a plain
Python form of the masks allows at each position.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_engine.core import request_receiver
from moe_engine.core.bad_words import BadWords
from moe_engine.structured_output.mask_batch import FilledAtOnce
from moe_engine.worker.sampling.token_masker import NOTHING_ALLOWED
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

VOCAB_SIZE, ORDINARY = 320, 250
LATE = {"bad_word_ids": [[0, 1]]}
TIE = 1e-4
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"speculative_algorithm": "NEXTN", **CHAIN},
    "tree": {"speculative_algorithm": "NEXTN", **TREE},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
}


def forbidden(outputs: list[int], limit: int) -> list[bool]:
    """The next tokens that a pseudo-random function of all outputs forbids: a third of those below the limit."""
    rng = np.random.default_rng([len(outputs), *outputs[-3:], sum(outputs)])
    out = rng.random(VOCAB_SIZE) < 0.3
    out[len(outputs) % limit] = False  # never all tokens
    out[limit:] = True
    return out.tolist()


class HistoryMasks(FilledAtOnce):
    """`PositionMasks` of `forbidden`."""

    def __init__(self, sequences: Any, limit: int = VOCAB_SIZE) -> None:
        self._limit = limit
        self._tokens: list[int] = []

    def accept(self, token: int) -> None:
        assert not forbidden(self._tokens, self._limit)[token]
        self._tokens.append(token)

    def fill(self, mask: np.ndarray) -> None:
        for token, bad in enumerate(forbidden(self._tokens, self._limit)):
            if bad:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self._tokens)
        del self._tokens[len(self._tokens) - count :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    return agreeing_checkpoint("deepseek_v3", folder / "model", random.randrange(1 << 20), num_mtp_layers=1)


@pytest.fixture(scope="module", params=FORMS)
def engine(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: Any) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(
        checkpoint,
        tmp_path_factory.mktemp("board") / "board",
        dtype="float32",
        page_size=4,
        max_total_tokens=2048,
        max_running_requests=8,
        cpu_threads=1,
        **FORMS[request.param],
    )
    yield engine
    engine.close()


def make_script(seed: int, *, masked: int, count: int = 8) -> list[Scripted]:
    """Every `masked`-th request has late masks; greedy."""
    rng = random.Random(seed)
    prefix = [rng.randrange(ORDINARY) for _ in range(21)]
    script = []
    for i in range(count):
        own = [rng.randrange(ORDINARY) for _ in range(rng.randint(1, 30))]
        script.append(
            Scripted(
                rid=f"r{i}-",
                prompt_ids=prefix + own + own[:8],
                max_new_tokens=rng.randint(1, 20),
                arrives=rng.randint(0, 8),
                sampling={"temperature": 0.0, "ignore_eos": True},
                resolved=LATE if i % masked == 0 else {},
            )
        )
    return script


def check_masked(engine: InProcessEngine, item: Scripted, answer: Answer, limit: int = VOCAB_SIZE) -> None:
    """Each token has the largest log-probability, up to rounding, of the tokens allowed at its position."""
    outputs = answer.token_ids
    assert len(outputs) == item.max_new_tokens
    whole = Scripted(
        "oracle-",
        item.prompt_ids + outputs,
        max_new_tokens=1,
        logprob=True,
        logprob_start=len(item.prompt_ids),
        more={"top_logprobs": VOCAB_SIZE},
    )
    entries = engine.run([whole], disable_radix_cache=True)[whole.rid].prompt_logprobs[-len(outputs) :]
    for i, (token, entry) in enumerate(zip(outputs, entries, strict=True)):
        banned, values = forbidden(outputs[:i], limit), dict(entry.top)
        assert not banned[token]
        assert values[token] > max(values[t] for t in range(VOCAB_SIZE) if not banned[t]) - TIE


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [True, False])
def test_masks_of_every_position(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    found_in_text = engine.config.speculation is not None and engine.config.speculation.method == "ngram"
    limit = 4 if found_in_text else VOCAB_SIZE  # so that drafts of all kinds are accepted
    monkeypatch.setattr(request_receiver, "BadWords", partial(HistoryMasks, limit=limit))
    script = make_script(random.randrange(1 << 30), masked=2)
    for item in script:
        item.max_new_tokens += 10
    launched: list[int] = []
    launch = engine.worker.launch
    monkeypatch.setattr(engine.worker, "launch", lambda plan: launched.append(len(plan.masked)) or launch(plan))
    found = engine.run(script, overlap=overlap, chunked_prefill_size=16, enable_mixed_chunk=True)
    if engine.scheduler.speculator is not None:
        assert sum(engine.scheduler.stats().speculation.accepted) > 0
    assert launched and min(launched) > 0
    launched.clear()
    plain = engine.run([replace(item, resolved={}) for item in script])
    assert not launched
    changed = 0
    for item in script:
        if item.resolved:
            check_masked(engine, item, found[item.rid], limit)
            changed += found[item.rid].token_ids != plain[item.rid].token_ids
        else:
            assert found[item.rid].token_ids == plain[item.rid].token_ids
    assert changed


def test_retracted_requests_keep_their_masks(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_receiver, "BadWords", HistoryMasks)
    script = make_script(random.randrange(1 << 30), masked=1)
    found = engine.run(
        script, num_slots=160, schedule_conservativeness=0.0, clip_max_new_tokens=2, retract_decode_steps=1
    )
    for item in script:
        check_masked(engine, item, found[item.rid])


def test_masks_that_raise_end_only_their_request(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(BadWords):
        def fill(self, mask: np.ndarray) -> None:
            if len(self._tokens) == 3:
                raise RuntimeError("third token")

    class Empty(BadWords):
        def fill(self, mask: np.ndarray) -> None:
            mask[:] = 0

    script = make_script(random.randrange(1 << 30), masked=3)
    for item in script:
        item.max_new_tokens = 9
    expected = engine.run([replace(item, resolved={}) for item in script])
    failing, empty = (Failing, 3, 500, "RuntimeError: third token"), (Empty, 0, 400, "bad_words: no token of the")
    for masks, count, status, words in (failing, empty):
        monkeypatch.setattr(request_receiver, "BadWords", masks)
        found = engine.run(script)
        for item in script:
            answer = found[item.rid]
            if item.resolved:
                assert answer.finish is not None
                at_root = words in answer.finish["message"]
                assert answer.finish["status_code"] == (status if at_root else 400)
                assert at_root or answer.finish["message"] == NOTHING_ALLOWED.message
                assert answer.token_ids == expected[item.rid].token_ids[:count]
            else:
                assert answer.token_ids == expected[item.rid].token_ids


def test_a_failed_step_before_a_launched_one(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_receiver, "BadWords", HistoryMasks)
    script = make_script(random.randrange(1 << 30), masked=1, count=3)
    for item in script:
        item.arrives, item.max_new_tokens = 0, 12
    launch, seen = engine.worker.runner._launch, []

    def fail_once(plan: Any) -> Any:
        seen.append(plan.number)
        if len(seen) == 4:
            raise RuntimeError("once")
        return launch(plan)

    monkeypatch.setattr(engine.worker.runner, "_launch", fail_once)
    found = engine.run(script)
    for item in script:
        check_masked(engine, item, found[item.rid])


def test_bad_words_and_allowed_tokens(engine: InProcessEngine) -> None:
    script = make_script(random.randrange(1 << 30), masked=1, count=4)
    for item in script:
        item.resolved, item.max_new_tokens = {}, 16
    free = engine.run(script)
    pairs = {item.rid: free[item.rid].token_ids[4:6] for item in script}
    single = {item.rid: free[item.rid].token_ids[1] for item in script}
    for item in script:
        item.resolved = {"bad_word_ids": [pairs[item.rid]]}
    found = engine.run(script)
    for item in script:
        tokens, first, second = found[item.rid].token_ids, *pairs[item.rid]
        assert (first, second) not in pairwise(tokens)
        assert len(tokens) == 16
    for item in script:
        item.resolved = {"bad_word_ids": [[single[item.rid]]]}
    for rid, answer in engine.run(script).items():
        assert single[rid] not in answer.token_ids
    for item in script:
        item.resolved = {"allowed_token_ids": [3, 5, 31, 32, 319]}
    for answer in engine.run(script).values():
        assert set(answer.token_ids) <= {3, 5, 31, 32, 319}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.each_value
def test_a_thinking_budget_ends_the_reasoning(engine: InProcessEngine, inside: bool) -> None:
    """Greedy tokens up to the budget, then the end tag, then what the model says after it."""
    script = make_script(random.randrange(1 << 20), masked=1, count=4)
    free = [replace(item, resolved={}, max_new_tokens=16) for item in script]
    plain = engine.run(free)
    bounded, limits = [], {}
    for item in free:
        ids = plain[item.rid].token_ids
        limit = limits[item.rid] = random.randint(1, 8)
        begins = limit if inside else limit + 1  # after the tag that begins the reasoning
        end = next(token for token in range(ORDINARY) if token not in ids[: begins + 1])
        tags = (-1 if inside else ids[0], end)
        more = {"max_thinking_tokens": limit, "thinking_tags": tags}
        bounded.append((replace(item, resolved=more), begins, end))
    answers = engine.run([item for item, _, _ in bounded])
    for item, begins, end in bounded:
        ids = answers[item.rid].token_ids
        assert ids[: begins + 1] == [*plain[item.rid].token_ids[:begins], end]
        behind = Scripted("behind-", item.prompt_ids + ids[: begins + 1], 16 - begins - 1, sampling=item.sampling)
        if behind.max_new_tokens:
            assert ids[begins + 1 :] == engine.run([behind], disable_radix_cache=True)["behind-"].token_ids
