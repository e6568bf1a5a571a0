"""Schedules: every row and every visible token exactly once, evenly over programs; needs no Triton."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.kernels.attention.schedule import MIN_TILES, ScheduleBuffers, Split, cut, schedule

requests = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 900)), max_size=12)


def check(lens: list[tuple[int, int]], per_token: int, split: Split, tree: bool) -> np.ndarray:
    """Raises unless segments and merges cover the requests exactly; returns the segments."""
    queries = [q for q, _ in lens]
    contexts = [q + before for q, before in lens]
    segments, merges, num_partials = cut(queries, contexts, per_token, split, tree)
    first_token = np.cumsum([0, *queries])
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for request, token, left, row, seen, begin, stop, partial in segments.tolist():
        assert token == first_token[request] and row % split.block_m == 0
        assert left == queries[request] * per_token - row > 0
        assert seen == contexts[request] - queries[request] + 1
        assert begin % split.block_n == 0 and begin < stop
        covered.setdefault((request, row), []).append((begin, stop, partial))
    slots: set[int] = set()
    expected_merges = {}
    for request, count in enumerate(queries):
        for row in range(0, count * per_token, split.block_m):
            parts = sorted(covered.pop((request, row)))
            last = min(row + split.block_m, count * per_token) - 1
            end = contexts[request] if tree else contexts[request] - count + 1 + last // per_token
            assert parts[0][0] == 0 and parts[-1][1] >= end and parts[-1][1] <= contexts[request]
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            if len(parts) == 1:
                assert parts[0][2] == -1
                continue
            first = parts[0][2]
            mine = set(range(first, first + len(parts)))
            assert [p for _, _, p in parts] == sorted(mine) and not mine & slots
            slots |= mine
            expected_merges[first] = [first_token[request], count * per_token - row, row, first, len(parts)]
    assert not covered
    assert slots <= set(range(num_partials))
    assert {m[3]: m[:5] for m in merges.tolist()} == expected_merges
    lengths = segments[:, 6] - segments[:, 5]
    if len(lengths):
        assert (np.diff(-(-lengths // split.block_n)) <= 0).all(), "longest first"
    return segments


@settings(max_examples=60)
@given(requests, st.integers(1, 40), st.sampled_from([16, 64]), st.integers(1, 30), st.booleans(), st.booleans())
def test_everything_is_covered_once(lens, per_token, block_m, programs, tree, fixed) -> None:
    check(lens, per_token, Split(block_m, 16, programs, 5 if fixed else None), tree)


@pytest.mark.parametrize(("per_token", "block_m"), [(16, 16), (128, 64)])
def test_uneven_contexts_are_cut_evenly(per_token: int, block_m: int) -> None:
    """Programs that take segments when they become free end within two tiles of an even share."""
    contexts = [17, 40_000, 900, 2_100, 64, 9_000, 3_333]
    programs = 132
    segments = check([(1, c - 1) for c in contexts], per_token, Split(block_m, 64, programs), False)
    free = np.zeros(programs)
    for begin, stop in segments[:, 5:7]:
        free[free.argmin()] += -(-(stop - begin) // 64)
    assert free.max() <= -(-free.sum() // programs) + MIN_TILES


def test_blocks_that_read_the_same_tokens_stand_together() -> None:
    segments = check([(1, 5_000), (1, 9_000)], 128, Split(64, 64, 40), False)
    pairs = segments.reshape(-1, 2, 8)
    assert (pairs[:, 0, 5:7] == pairs[:, 1, 5:7]).all() and (pairs[:, 0, 0] == pairs[:, 1, 0]).all()
    assert (pairs[:, 1, 3] - pairs[:, 0, 3] == 64).all()


def test_fixed_cuts_do_not_depend_on_the_batch() -> None:
    split = Split(16, 16, 9, fixed_tiles=4)
    alone = check([(2, 333)], 4, split, False)
    among = check([(1, 70), (2, 333), (9, 2)], 4, split, False)
    mine = among[among[:, 0] == 1]
    assert (alone[:, 3:7] == mine[:, 3:7]).all()


def test_an_empty_step() -> None:
    empty = schedule([], [], 4, Split(16, 16, 4), torch.device("cpu"))
    assert empty.segments.shape == (0, 8) and empty.merges.shape == (0, 8) and empty.num_partials == 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=24), st.integers(1, 5), st.integers(1, 140),
    st.sampled_from([16, 64]), st.integers(1, 40), st.sampled_from([None, 1, 30, 46, 500]),
)  # fmt: skip
def test_room_for_decodes_is_room_for_every_context(befores, count, per_token, block_m, programs, window) -> None:
    """`fill` raises if a schedule does not fit. A window of at most four tiles is not cut."""
    split, device = Split(block_m, 16, programs), torch.device("cpu")
    buffers = ScheduleBuffers.for_decodes(len(befores), count, per_token, split, device, window)
    contexts = [before + count for before in befores]
    made = schedule([count] * len(befores), contexts, per_token, split, device, window=window, buffers=buffers)
    segments, merges, _ = cut([count] * len(befores), contexts, per_token, split, window=window, bounds=True)
    if window is not None and window + count - 1 <= 49:  # the last token of a tile, and three tiles
        assert not len(merges) and made.num_partials == 0
        assert ((segments[:, 6] - segments[:, 5]) <= 4 * 16).all()
    assert (made.segments[: len(segments)].numpy() == segments).all() and not made.segments[len(segments) :].any()
    assert (made.merges[: len(merges)].numpy() == merges).all() and not made.merges[len(merges) :].any()
