"""Prompt lookup (n-grams) against a search with Python lists. On a device: `simulated_cuda/on_device`."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.models import step_memory
from moe_engine.types import NewRow, Request, SamplingParams, SpeculationConfig, StepPlan, StepResult
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.speculation import ngram_match
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.speculation.ngram import NgramDrafter
from moe_engine.worker.speculation.ngram_match import TextIndex
from tests.memory_meter import MemoryMeter
from tests.speculation.toy_engine import ToyEngine, random_table

WIDTH = 48


def naive(text: list[int], min_match: int, max_match: int, depth: int) -> list[int]:
    """Tokens after the latest of the longest earlier matches of the text's end; -1 beyond the text."""
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        wanted = text[len(text) - size :]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == wanted:
                found = text[end : end + depth]
                return found + [-1] * (depth - len(found))
    return [-1] * depth


def history_of(texts: list[list[int]], stale: int, stream: DeviceStream, width: int = WIDTH) -> TokenBuffer:
    """Rows with known text; after it `stale` tokens of rejected drafts."""
    history = TokenBuffer(len(texts), width, stream)
    history.tokens.fill_(stale)
    for row, text in enumerate(texts):
        history.enter(new_row(row, text))
    return history


def new_row(row: int, text: list[int]) -> NewRow:
    slots = list(range(len(text) - 1))  # the last token is not computed
    return NewRow(row, "r", text, len(text), slots, SamplingParams(), 0, frozenset())


def prepared(
    texts: list[list[int]],
    rows: list[int],
    depth: int,
    min_match: int,
    max_match: int,
    stale: int = 0,
    stream: DeviceStream | None = None,
) -> tuple[NgramDrafter, DraftTask]:
    stream = stream or DeviceStream("cpu")
    history = history_of(texts, stale, stream, max(WIDTH, *(len(text) for text in texts)))
    index = stream.from_list(rows, torch.int64)
    lengths = np.array([len(texts[row]) - 1 for row in rows])
    roots = stream.from_list([texts[row][-1] for row in rows], torch.int64)
    task = DraftTask(np.array(rows), lengths, index, roots, depth, 1, depth + 1)
    drafter = NgramDrafter(history, min_match, max_match, stream)
    for row, text in enumerate(texts):
        drafter.enter(new_row(row, text))
    return drafter, task


def check_drafts(drafts: Drafts, texts: list[list[int]], rows: list[int], expected: list[list[int]]) -> None:
    tokens = drafts.tokens.tolist()
    assert drafts.parents is None and [row[0] for row in tokens] == [texts[row][-1] for row in rows]
    assert [row[1:] for row in tokens] == expected


@settings(max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH - 8), min_size=1, max_size=5),
    depth=st.integers(1, 5),
    window=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    stale=st.integers(0, 2),
    seed=st.integers(0, 1000),
    block=st.sampled_from([1, 3, 16, 64]),
    at_once=st.sampled_from([1, 4, 1000]),
)
def test_match_is_the_naive_search(
    texts: list[list[int]], depth: int, window: tuple[int, int], stale: int, seed: int, block: int, at_once: int
) -> None:
    min_match, max_match = window[0], window[0] + window[1]
    rows = np.random.default_rng(seed).permutation(len(texts)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_match, "BLOCK", block)
        patch.setattr(ngram_match, "UNSORTED", block)
        patch.setattr(ngram_match, "NGRAM_PLACES", block * at_once)
        drafter, task = prepared(texts, rows, depth, min_match, max_match, stale)
        drafts = drafter.propose(task)
    check_drafts(drafts, texts, rows, [naive(texts[row], min_match, max_match, depth) for row in rows])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7, 8, 9, 4, 7, 8], [9, 4, 7]),
        ([5, 5, 5, 5], [5, -1, -1]),  # the match may overlap the searched end
        ([1, 2, 3], [-1, -1, -1]),
        ([1, 2, 6, 1, 2, 7, 1, 2], [7, 1, 2]),  # the latest of equal matches
        ([3, 1, 2, 6, 1, 2, 7, 3, 1, 2], [6, 1, 2]),  # a longer match is preferred to a later one
        ([9, 9, 4, 1], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
)
def test_examples(text: list[int], expected: list[int]) -> None:
    drafter, task = prepared([text], [0], 3, 1, 12)
    check_drafts(drafter.propose(task), [text], [0], [expected])


@pytest.mark.parametrize("seed", range(4))
def test_over_a_whole_run(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Chunked prompts, rejected drafts, retractions, reused rows, and requests that arrive with outputs: drafts depend
    only on the request's own tokens."""
    monkeypatch.setattr(ngram_match, "UNSORTED", 3)
    pick = np.random.default_rng(seed)
    texts: dict[int, list[int]] = {}
    proposed: list[bool] = []

    class Checked(NgramDrafter):
        def propose(self, task: DraftTask) -> Drafts:
            drafts = super().propose(task)
            for row, own in zip(task.rows.tolist(), drafts.tokens.tolist()):
                assert own[0] == texts[row][-1]
                assert own[1:] == naive(texts[row], 1, 12, task.depth)
                proposed.append(own[1] >= 0)
            return drafts

    def make(runner: ModelRunner, rng: np.random.Generator) -> Checked:
        assert runner.rows.history is not None
        return Checked(runner.rows.history, 1, 12, runner.stream)

    config = SpeculationConfig("ngram", 3)
    engine = ToyEngine(
        random_table(4, seed, spread=3.0), config, make, num_slots=110, max_rows=6, chunked_prefill_size=7,
        schedule_conservativeness=0.0, clip_max_new_tokens=2, retract_decode_steps=1,
    )  # fmt: skip
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            texts[new.row] = list(new.token_ids)
        result = execute(plan)
        for row, tokens in zip(result.rows, result.tokens):
            texts[row] += tokens
        return result

    monkeypatch.setattr(engine.runner, "execute", watched)
    requests = [
        Request(
            f"r{i}", pick.integers(0, 4, pick.integers(1, 20)).tolist(), SamplingParams(temperature=0.8), 18, seed=i
        )
        for i in range(24)
    ]
    requests[3].output_ids = [1, 2, 1]  # started on another rank
    steps = engine.run(requests)
    assert len(proposed) > 60 and any(proposed) and not all(proposed)
    entered = [new.rid for step in steps for new in step.plan.new_rows]
    assert len(entered) > len(set(entered)), "nothing was retracted"


def test_scratch_memory_of_the_device_does_not_grow_with_the_texts() -> None:
    """The search takes the ledger's memory, for any lengths."""
    pick = np.random.default_rng(0)
    texts = [pick.integers(0, 50, 200_000).tolist() for _ in range(12)]
    lengths = np.array([len(text) - 1 for text in texts])
    history = history_of(texts, 0, DeviceStream("cpu"), 200_000)
    with MemoryMeter() as meter:
        found = ngram_match.find_on_device(
            history.tokens, np.arange(12), lengths, 1, 12, DeviceStream("cpu")
        )  # fmt: skip
    assert 8 * step_memory.NGRAM_PLACES < meter.peak < step_memory.NGRAM_PLACES * step_memory.NGRAM_PLACE_BYTES
    assert found.tolist() == [TextIndex().find(np.array(text, dtype=np.int32), 1, 12) for text in texts]


def test_memory_of_the_host_is_the_ledgers() -> None:
    """Indexes are kept; the search of one text takes scratch memory, most if the text repeats one token."""
    pick = np.random.default_rng(0)
    length = 100_000
    texts = pick.integers(0, 129_280, (5, length)).astype(np.int32)
    texts[2:] = texts[2:, -1:]
    indexes = [TextIndex() for _ in texts]
    tracemalloc.start()
    try:
        for index, text in zip(indexes, texts):
            index.find(text, 1, 12)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    index_bytes = len(texts) * length * step_memory.NGRAM_INDEX_BYTES
    assert 0.9 * index_bytes < kept < 1.01 * index_bytes
    assert length * step_memory.NGRAM_HOST_BYTES / 2 < peak - kept < length * step_memory.NGRAM_HOST_BYTES


@settings(max_examples=100)
@given(
    text=st.lists(st.sampled_from([0, 1, 65535, 65536, 70000, 131072]), min_size=2, max_size=60),
    unsorted=st.integers(0, 20),
    window=st.tuples(st.integers(1, 3), st.integers(0, 6)),
    data=st.data(),
)
def test_index_of_a_growing_text(text: list[int], unsorted: int, window: tuple[int, int], data: st.DataObject) -> None:
    """Each search returns the naive search's match; tokens need more than 16 bits."""
    least, most = window[0], sum(window)
    index, known = TextIndex(), 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_match, "UNSORTED", unsorted)
        while known < len(text):
            known = min(len(text), known + data.draw(st.integers(1, 12)))
            found = index.find(np.array(text[:known], dtype=np.int32), least, most)
            following = text[found : min(known, found + 3)]
            assert following + [-1] * (3 - len(following)) == naive(text[:known], least, most, 3)


def test_a_search_does_not_read_the_text_again() -> None:
    """A repeated search reads only the newest tokens and the occurrences of the last token."""
    text = np.arange(50_000, dtype=np.int32)
    text[[7, 30_000, 49_999]] = 5
    index = TextIndex()
    assert index.find(text[:49_000], 1, 4) == 49_000
    text[8:29_000] = 5  # not allowed: shows that these positions are not compared with the last token
    assert index.find(text, 1, 1) == 30_001
    text[30_000] = 6
    assert index.find(text, 1, 1) == 30_001
