"""Parts of the worker on a simulated device: the same values as on the host, without waits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.kernels.ops.hashed_rows import HashedRows
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.replicas import ALGORITHMS
from moe_engine.parallel.recording.accumulators import LogicalMap
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.draft_counts import DraftCounts
from moe_engine.types import NewRow, SamplingParams
from moe_engine.worker.device_stream import DeviceStream, StepClock
from moe_engine.worker.sampling.token_masker import TokenMasker
from tests.simulated_cuda import streams
from tests.speculation.test_ngram import WIDTH, check_drafts, naive, prepared
from tests.worker.test_tables import check_table, make_table

GPU = DeviceStream("cuda")


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.int32, torch.int64]))
def test_a_table_is_its_flat_array(seed: int, dtype: torch.dtype) -> None:
    check_table(seed, dtype, GPU)


def test_only_reads_of_a_table_wait() -> None:
    table, _ = make_table(GPU, np.arange(6), torch.int32)
    index = GPU.upload(torch.tensor([0, 5]))
    streams.waits.clear()
    table.put(index, table.take(index))
    table.put_from_host(np.array([1]), np.array([4]))
    assert not table.read(np.zeros(0, dtype=np.int64)).size
    assert streams.waits == []
    table.read(np.array([1]))
    assert len(streams.waits) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_device_memory_has_no_host_view(dtype: torch.dtype) -> None:
    tensors = torch.arange(4, device="cuda").to(dtype), torch.zeros(2, 3, dtype=dtype, device="cuda")
    assert GPU.arrays(*tensors) == tensors
    assert GPU.host_view(tensors[0]) is None


@settings(max_examples=25)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH - 8), min_size=1, max_size=5),
    depth=st.integers(1, 5),
    window=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    stale=st.integers(0, 2),
)
def test_ngrams_are_matched_without_waits(
    texts: list[list[int]], depth: int, window: tuple[int, int], stale: int
) -> None:
    rows, most = list(range(len(texts)))[::-1], sum(window)
    drafter, task = prepared(texts, rows, depth, window[0], most, stale, GPU)
    streams.waits.clear()
    drafts = drafter.propose(task)
    assert streams.waits == []
    check_drafts(drafts, texts, rows, [naive(texts[row], window[0], most, depth) for row in rows])


def test_masks_are_applied_on_the_device() -> None:
    masker, picks = TokenMasker(3, 70, GPU), [sorted(random.sample(range(70), 5)) for _ in range(2)]
    for row, allowed in enumerate(picks, 1):
        masker.enter(NewRow(row, "r", [1], 1, [], SamplingParams(allowed_token_ids=tuple(allowed)), 0, frozenset()))
    for rows in ([1, 2], [0, 2]):
        logits = torch.zeros(2, 70, device=GPU.device)
        masker.apply(logits, np.array(rows))
        found = [torch.isfinite(row).nonzero().view(-1).tolist() for row in logits.cpu()]
        assert found == [picks[row - 1] if row else list(range(70)) for row in rows]


def test_a_clock_measures_between_its_marks() -> None:
    """Reading waits only for the last mark; launching does not wait."""
    stream, before = DeviceStream("cuda"), len(streams.waits)
    clock = StepClock(stream)
    torch.ones(4, device="cuda").add_(1)
    clock.mark()
    clock.mark()
    assert len(streams.waits) == before
    parts = clock.seconds()
    assert len(parts) == 2 and all(part >= 0 for part in parts)


def test_captured_reads_follow_another_table() -> None:
    """Rows of n-gram tables: as after an update of the weights."""
    primes, multipliers, dtype = (101, 103), (2**50 + 1, 2**49 + 3), torch.float8_e4m3fn
    old, new = (
        HashedRows(torch.randint(120, (204, 32), dtype=torch.uint8), dtype, scales, primes, multipliers)
        for scales in torch.randint(100, 140, (2, 204, 1), dtype=torch.uint8)
    )
    ids = torch.randint(8000, (5, 2), dtype=torch.int32).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = old.read(ids, torch.float32)
    old.follow(new)
    graph.replay()
    assert torch.equal(found.cpu(), new.read(ids.cpu(), torch.float32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_moved_experts_are_announced_without_waits(algorithm: str, tmp_path: Path) -> None:
    """Tables and counters of a model's layer and an MTP layer, between two steps."""
    first = ExpertPlacement(np.array([[0, 1, 2, 0]], dtype=np.int32), 3, 2)
    tables = ExpertTables(first, 1, algorithm, num_more_layers=1, device="cuda")  # type: ignore[arg-type]
    config = RecorderConfig("stat", 1, 3, 4, tmp_path, device="cuda")
    counters = LogicalMap(config), DraftCounts(1, torch.tensor([[0, 1, 2, 0]], device="cuda"), 3)
    moved = [2, 1, 0, 2]
    streams.waits.clear()
    for layer, counter in enumerate(counters):
        tables.update_layer(layer, moved, counter, tables.prepare(layer, moved))
    assert streams.waits == []
    ids, logical = torch.arange(-1, 3, device="cuda")[:, None], counters[0].to_logical
    for layer in range(2):
        slots = tables.to_physical(layer, ids).flatten().tolist()
        assert slots[:3] == [-1, 2, 1] and slots[3] in (0, 3)
    assert logical(torch.tensor([[1, 2, 4, 8]], dtype=torch.int32, device="cuda")).tolist() == [[4, 2, 9]]
