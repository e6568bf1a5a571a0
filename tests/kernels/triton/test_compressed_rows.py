"""Rows of windows and compressed entries: those of captured steps, computed on the device, equal those of the host."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.compression.protocol import Kept
from moe_engine.kernels.compression.reference import TorchCompression
from moe_engine.kernels.indexer.reference import TorchIndexer
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models import step_memory
from moe_engine.models.batch import ForwardBatch, WindowSlots
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.layers.attention.compressed_in_place import StepInPlace
from moe_engine.models.layers.attention.compressed_rows import CompressedStep
from moe_engine.models.layers.attention.compressed_step import StepRows

TritonCompression = pytest.importorskip(
    "moe_engine.kernels.compression.triton_compression", reason="needs triton"
).TritonCompression
TritonIndexer = pytest.importorskip("moe_engine.kernels.indexer.triton_indexer", reason="needs triton").TritonIndexer

RATES = (0, 4, 8)
WIDTH = 96
"""Tokens of the longest request."""


@dataclass
class Plan:
    selected: Selected
    on_device = True
    common = False
    renewed = 0

    def renew(self) -> None:
        self.renewed += 1


def config(top_k: int) -> CompressedConfig:
    return CompressedConfig(4, 32, 8, 16, 11, RATES, 4, 2, 16, top_k, 2, 16)


def steps_of(attention: CompressedConfig) -> StepRows:
    sparse = SparseAttention(Plan, None, Plan, sinks=True)  # type: ignore[arg-type]
    backend: Any = SimpleNamespace(name="stub", capabilities=SimpleNamespace(sparse=sparse))
    layers = {rate: i for i, rate in enumerate(RATES)}
    return StepRows(attention, layers, backend, TritonIndexer(), TritonCompression())


def decodes(lens: list[int], count: int, table: Tensor, windows: Tensor) -> ForwardBatch:
    """The last `count` tokens of requests of these lengths."""
    size = len(lens)
    positions = torch.tensor([n - count + i for n in lens for i in range(count)])
    rows = torch.randperm(len(table))[:size].int()
    starts = torch.arange(0, size * count + 1, count, dtype=torch.int32)
    queries = PagedQueries([count] * size, list(lens), rows, starts, torch.tensor(lens, dtype=torch.int32), table, 1)
    of_token = rows.long().repeat_interleave(count)
    return ForwardBatch(
        positions, positions, table[of_token, positions].long(), positions[:0], AttentionBatch(queries, None), None, [],
        windows=WindowSlots(windows[of_token, positions].long(), windows),
    )  # fmt: skip


def attended(step: CompressedStep) -> dict[int, list[list[int]]]:
    """The rows of each token, by rate."""
    return {
        rate: [
            slots[:count] for slots, count in zip(rows.selected.slots.tolist(), rows.selected.counts_device.tolist())
        ]
        for rate, rows in step.rows.items()
    }


def select(step: CompressedStep, attention: CompressedConfig, seed: int) -> None:
    """Random queries select among random entries."""
    if step.selection is None:
        return
    torch.manual_seed(seed)
    found = step.selection
    q, weights = torch.randn(len(found.counts), 2, 16), torch.randn(len(found.counts), 2)
    keys, rows = torch.randn(1000, 1, 16), step.rows[attention.selected_rate].selected.slots
    found.select(TritonIndexer(), q, weights, keys, attention.top_k, rows)


@pytest.mark.parametrize("top_k", [3, 40])
@pytest.mark.parametrize("count", [1, 3])
def test_captured_rows_equal_those_of_the_host(count: int, top_k: int) -> None:
    """Steps of several lengths with one plan, the second size over the memory of the first; padded requests."""
    attention, rows = config(top_k), torch.empty(0)
    rings = (), (Kept(rows, 8 + count, 16),), (Kept(rows, 8 + count, 0),)
    caches = [SimpleNamespace(num_slots=400, kept=kept) for kept in rings]
    steps = steps_of(attention)
    table = torch.randperm(100 * WIDTH)[: 6 * WIDTH // 8].mul_(8).view(6, -1, 1).add(torch.arange(8)).view(6, WIDTH)
    table, windows = table.int().contiguous() % 3200, torch.randint(400, (6, WIDTH), dtype=torch.int32)
    for size in (5, 2):
        plan = None
        for round_ in range(4):
            longest = (WIDTH, 12, 50, 30)[round_]
            lens = [random.randint(count, longest) for _ in range(size)]
            batch = replace(decodes(lens, count, table, windows), kv=caches)
            if plan is None:
                plan = steps.plan_in_place(batch.attention)
                assert isinstance(plan, StepInPlace) and plan.on_device
            queries = plan._queries
            queries.context_lens[:] = lens
            plan.renew()
            captured = steps.of(replace(batch, attention_plan=plan))
            eager = steps.of(batch)
            seed = random.randrange(1 << 30)
            select(captured, attention, seed)
            select(eager, attention, seed)
            assert attended(captured) == attended(eager), lens
            assert torch.equal(captured.slots, eager.slots)
            assert all(map(torch.equal, captured.tokens, eager.tokens))
            for rate, kept in captured.kept.items():
                assert kept.tokens is None is eager.kept[rate].tokens
                assert kept.apart and not eager.kept[rate].apart
                assert torch.equal(kept.places, eager.kept[rate].places)
            real = torch.ones(size * count, dtype=torch.int32)
            real[-count:] = 0
            padded = steps.of(replace(batch, attention_plan=plan, real=real))
            assert [kept.places[-count:].tolist() for kept in padded.kept.values()] == [[0] * count] * 2
            for rate, rows in captured.rows.items():
                assert rows.selected.counts == eager.rows[rate].selected.counts


@pytest.mark.parametrize("block", [0, 16])
def test_contributions_are_kept_beside_entries_only_if_no_entry_reads_their_rows(block: int) -> None:
    """Two entries of 4 tokens and a step fit into a ring of 8 + `count` - 1 rows; or each slot of a block has one."""
    attention, rows = config(40), torch.empty(0)
    table = torch.arange(WIDTH, dtype=torch.int32).expand(2, -1).contiguous()
    batch = decodes([40, 63], 3, table, table)
    for each, apart in ((9, False), (10, True), (16, True)):
        rings = (), (Kept(rows, each, block),), (Kept(rows, 10, 0),)
        caches = [SimpleNamespace(num_slots=400, kept=kept) for kept in rings]
        steps = steps_of(attention)
        plan = steps.plan_in_place(batch.attention)
        found = steps.of(replace(batch, kv=caches, attention_plan=plan)).kept
        assert (found[4].apart, found[8].apart) == (apart, True)
    if block:
        caches[1] = SimpleNamespace(num_slots=400, kept=(Kept(rows, 8, 8),))
        assert steps.of(replace(batch, kv=caches, attention_plan=plan)).kept[4].apart


def test_plans_are_renewed_for_other_lengths_only() -> None:
    """Lists of windows and of selections are full in long requests: their plans stay."""
    attention = config(3)
    table = torch.zeros(2, WIDTH, dtype=torch.int32)
    batch = decodes([40, 63], 1, table, table)
    plan = steps_of(attention).plan_in_place(batch.attention)
    assert plan is not None
    for lens in ([41, 63], [41, 64], [41, 65]):
        plan._queries.context_lens[:] = lens
        plan.renew()
    assert {rate: rows.plan.renewed for rate, rows in plan._attended.items()} == {0: 0, 4: 0, 8: 1}


def test_a_row_without_captured_launches_has_no_plan() -> None:
    attention = config(3)
    table = torch.zeros(2, WIDTH, dtype=torch.int32)
    batch = decodes([40], 1, table, table)
    steps = steps_of(attention)
    steps._indexer = TorchIndexer()
    assert steps.plan_in_place(batch.attention) is None
    steps = steps_of(attention)
    steps._compression = TorchCompression()
    assert steps.plan_in_place(batch.attention) is None


def test_memory_is_in_the_ledger() -> None:
    attention = config(3)
    steps, tokens, width = steps_of(attention), 8, 1 << 14
    of = partial(step_memory._compressed_bytes, attention, num_tokens=tokens, dtype_bytes=2)
    table = torch.zeros(tokens, width, dtype=torch.int32)
    assert steps.plan_in_place(decodes([40] * tokens, 1, table, table).attention)
    assert (
        0.9 * tokens * width * 4 / 8
        < steps._memory.num_bytes
        < (of(width, num_requests=tokens) - of(0, num_requests=tokens))
    )
    # the tokens of a prompt share the slots of its entries
    seven = of(width, num_requests=tokens) - of(width, num_requests=1)
    assert seven == 7 * 4 * (width // attention.selected_rate)
