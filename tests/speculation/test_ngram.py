"""Prompt lookup against a search with Python lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.history import History
from moe_engine.worker.speculation.drafts import DraftTask
from moe_engine.worker.speculation.ngram import NgramDrafter

WIDTH = 48


def naive(text: list[int], min_match: int, max_match: int, depth: int) -> list[int]:
    """What stands behind the latest of the longest earlier matches of the text's end; -1 where the text ends."""
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        wanted = text[len(text) - size :]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == wanted:
                found = text[end : end + depth]
                return found + [-1] * (depth - len(found))
    return [-1] * depth


def history_of(texts: list[list[int]], stale: int) -> History:
    """Rows whose text is known; behind it `stale` tokens that were tried and given up."""
    history = History(len(texts), WIDTH, DeviceStream("cpu"))
    history.tokens.fill_(stale)
    for row, text in enumerate(texts):
        slots = list(range(len(text) - 1))  # the last token is not computed
        history.enter(NewRow(row, "r", text, len(text), slots, SamplingParams(), 0, frozenset()))
    return history


def propose(history: History, rows: list[int], depth: int, min_match: int, max_match: int) -> torch.Tensor:
    index = torch.tensor(rows)
    lengths = history.lengths[index]
    roots = history.tokens[index, lengths].long()
    task = DraftTask(np.array(rows), lengths.numpy(), index, roots, depth, 1, depth + 1)
    drafts = NgramDrafter(history, min_match, max_match).propose(task)
    assert drafts.parents is None and torch.equal(drafts.tokens[:, 0], roots)
    return drafts.tokens[:, 1:]


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH - 8), min_size=1, max_size=5),
    depth=st.integers(1, 5),
    window=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    stale=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_match_is_the_naive_search(
    texts: list[list[int]], depth: int, window: tuple[int, int], stale: int, seed: int
) -> None:
    min_match, max_match = window[0], window[0] + window[1]
    rows = np.random.default_rng(seed).permutation(len(texts)).tolist()
    found = propose(history_of(texts, stale), rows, depth, min_match, max_match)
    assert found.tolist() == [naive(texts[row], min_match, max_match, depth) for row in rows]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7, 8, 9, 4, 7, 8], [9, 4, 7]),
        ([5, 5, 5, 5], [5, -1, -1]),  # the match may overlap the end it looks for
        ([1, 2, 3], [-1, -1, -1]),
        ([1, 2, 6, 1, 2, 7, 1, 2], [7, 1, 2]),  # the latest of equal ones
        ([3, 1, 2, 6, 1, 2, 7, 3, 1, 2], [6, 1, 2]),  # a longer one beats a later one
    ],
)
def test_examples(text: list[int], expected: list[int]) -> None:
    assert propose(history_of([text], 0), [0], 3, 1, 12).tolist() == [expected]
