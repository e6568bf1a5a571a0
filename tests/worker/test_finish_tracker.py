"""Rows end on the worker by the rules of the scheduler: end tokens after min_new_tokens, and the length."""

from __future__ import annotations

import random

import numpy as np

from moe_engine.scheduler.finish import end_ids, take_tokens
from moe_engine.types import NewRow, Request, SamplingParams
from moe_engine.worker.batch.finish_tracker import FinishTracker
from tests.examples import examples

ROWS, WIDTH, VOCAB = 6, 4, 12


def drawn(rng: random.Random, tracker: FinishTracker, row: int) -> Request:
    """A new request in a row."""
    sampling = SamplingParams(
        min_new_tokens=rng.choice([0, 0, 3, 9]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
        ignore_eos=rng.random() < 0.3,
    )
    request = Request(
        "r", [1] * rng.randint(1, 9), sampling, rng.randint(1, 12), frozenset(rng.sample(range(VOCAB), 1))
    )
    request.end_ids = end_ids(request)
    length = len(request.prompt_ids)
    new = NewRow(
        row, "r", [], length, [], sampling, 0, request.eos_token_ids, max_length=length + request.max_new_tokens
    )
    tracker.enter(new)
    return request


def test_rows_end_with_their_requests() -> None:
    rng, tracker = random.Random(random.getrandbits(32)), FinishTracker(ROWS)
    requests = {row: drawn(rng, tracker, row) for row in range(ROWS)}
    for _ in range(examples(300)):
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        tokens = np.array([rng.choices(range(VOCAB), k=WIDTH) for _ in rows])
        counts = np.array([rng.randint(1, WIDTH) for _ in rows])
        positions = np.array([requests[row].num_tokens for row in rows])
        tracker.note(np.array(rows), positions, tokens, counts)
        for row, some, count in zip(rows, tokens.tolist(), counts.tolist()):
            _, finish = take_tokens(requests[row], some[:count], VOCAB)
            assert tracker.ended[row] == (finish is not None), (requests[row], some, count)
            if finish is not None:
                requests[row] = drawn(rng, tracker, row)
        assert not tracker.ended.any()
