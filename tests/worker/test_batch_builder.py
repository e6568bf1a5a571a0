"""The builder against a token-by-token oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.kernels.queries import PagedQueries
from moe_engine.types import NewRow, RowWrite, SamplingParams, StepPlan
from moe_engine.worker.batch.batch_builder import BatchBuilder, StepBatch
from moe_engine.worker.batch.mla_form import MLAFormPolicy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream

MAX_ROWS, CONTEXT, VOCAB = 8, 48, 100
STREAM = DeviceStream("cpu")


def _rows() -> RequestRows:
    rows = RequestRows(MAX_ROWS, CONTEXT, VOCAB, STREAM)
    rows.last_token.copy_(torch.arange(MAX_ROWS) + 50)
    return rows


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.permutations(range(MAX_ROWS)))[: draw(st.integers(1, MAX_ROWS))]
    num_decodes = draw(st.integers(0, len(rows)))
    short = draw(st.booleans())  # only the last token of each prompt remains
    starts, counts, samples, new_rows, writes = [], [], [], [], []
    for i, row in enumerate(rows):
        starts.append(draw(st.sampled_from([0, 1]) | st.integers(0, CONTEXT - 12)))
        counts.append(1 if i < num_decodes or short else draw(st.integers(1, 12)))
        samples.append(i < num_decodes or short or draw(st.booleans()))
        if i >= num_decodes and draw(st.booleans()):  # added, possibly after a retraction, with a cached prefix
            tokens = [1] * (starts[i] + counts[i])
            cached = [1000 * row + t for t in range(starts[i])]
            new_rows.append(NewRow(row, f"r{row}", tokens, 1, cached, SamplingParams(), 0, frozenset()))
        elif starts[i] > 2 and draw(st.booleans()):
            writes.append(RowWrite(row, 1, [7000 + row, 8000 + row]))
    total = sum(counts)
    slots = draw(st.permutations(range(1, total + 1)))
    ids = draw(st.lists(st.integers(0, 49), min_size=total - num_decodes, max_size=total - num_decodes))
    return StepPlan(3, rows, starts, counts, samples, slots, num_decodes, ids, new_rows, writes)


def _check_group(queries: PagedQueries | None, members: list[int], plan: StepPlan) -> None:
    if not members:
        assert queries is None
        return
    assert queries is not None
    counts = [plan.counts[i] for i in members]
    ends = [plan.starts[i] + plan.counts[i] for i in members]
    assert queries.query_lens == counts
    assert queries.context_lens == ends == queries.context_lens_device.tolist()
    assert queries.rows.tolist() == [plan.rows[i] for i in members]
    assert queries.query_starts.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    for tensor in (queries.rows, queries.query_starts, queries.context_lens_device, queries.slot_table):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def _check(batch: StepBatch, plan: StepPlan, rows: RequestRows, form: MLAFormPolicy) -> None:
    entries = range(len(plan.rows))
    is_few = [i < plan.num_decodes or form.absorbed(plan.starts[i], plan.counts[i]) for i in entries]
    few, many = [i for i in entries if is_few[i]], [i for i in entries if not is_few[i]]
    _check_group(batch.attention.decode, few, plan)
    _check_group(batch.attention.prefill, many, plan)
    tokens, last_of = [], {}
    for i in few + many:
        before = sum(plan.counts[:i])
        for t in range(plan.counts[i]):
            decoded = i < plan.num_decodes
            token = 50 + plan.rows[i] if decoded else plan.input_ids[before + t - plan.num_decodes]
            tokens.append((token, plan.starts[i] + t, plan.slots[before + t]))
            assert rows.slot_table[plan.rows[i], plan.starts[i] + t] == plan.slots[before + t]
        last_of[i] = len(tokens) - 1
        assert batch.offsets[i] == len(tokens) - plan.counts[i]
    assert batch.input_ids.tolist() == [t[0] for t in tokens]
    assert batch.positions.tolist() == [t[1] for t in tokens]
    assert batch.slots.tolist() == [t[2] for t in tokens]
    sampling = [i for i in entries if plan.samples[i]]
    assert batch.logits_rows.tolist() == [last_of[i] for i in sampling]
    assert batch.sampled.rows.tolist() == [plan.rows[i] for i in sampling] == batch.sampled.rows_device.tolist()
    assert batch.sampled.lengths.tolist() == [plan.starts[i] + plan.counts[i] for i in sampling]
    assert batch.all_sampled == (batch.logits_rows.tolist() == list(range(len(tokens))))


@settings(max_examples=120)
@given(plan=plans(), break_even=st.sampled_from([0.0, 4.0, 1e9]), deterministic=st.booleans())
def test_any_plan(plan: StepPlan, break_even: float, deterministic: bool) -> None:
    rows, form = _rows(), MLAFormPolicy(break_even, deterministic)
    rows.apply(plan.finished_rows, plan.new_rows, plan.row_writes)
    _check(BatchBuilder(rows, 1, form, STREAM).build(plan), plan, rows, form)
    for new in plan.new_rows:
        assert rows.slot_table[new.row, : len(new.slots)].tolist() == new.slots
    for write in plan.row_writes:
        expected = torch.tensor(write.slots)
        place = rows.slot_table[write.row, write.start : write.start + 2]
        start = plan.starts[plan.rows.index(write.row)]
        assert (place == expected)[: max(0, start - write.start)].all()


def test_last_tokens_of_two_prompts_in_two_forms() -> None:
    """All tokens are sampled, but not in the plan's order: the second prompt's form comes first."""
    new = [
        NewRow(0, "a", [7], 1, [], SamplingParams(), 0, frozenset()),
        NewRow(1, "b", [1, 2, 3, 4, 5, 8], 6, [9, 10, 11, 12, 13], SamplingParams(), 0, frozenset()),
    ]
    plan = StepPlan(3, [0, 1], [0, 5], [1, 1], [True, True], [1, 2], 0, [7, 8], new)
    rows, form = _rows(), MLAFormPolicy(4.0)
    rows.apply([], new, [])
    batch = BatchBuilder(rows, 1, form, STREAM).build(plan)
    _check(batch, plan, rows, form)
    assert not batch.all_sampled and batch.logits_rows.tolist() == [1, 0]


@settings(max_examples=40)
@given(data=st.data(), count=st.integers(1, MAX_ROWS))
def test_repeated_decodes_take_the_fast_path(data: st.DataObject, count: int) -> None:
    rows, form = _rows(), MLAFormPolicy()
    builder, plain = BatchBuilder(rows, 1, form, STREAM), BatchBuilder(rows, 1, form, STREAM)
    members = data.draw(st.permutations(range(MAX_ROWS)))[:count]
    starts = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    previous = None
    for step in range(4):
        if step == 3:
            members = members[::-1]
        slots = [100 * step + i + 1 for i in range(count)]
        plan = StepPlan(step, list(members), [s + step for s in starts], [1] * count, [True] * count, slots, count)
        fast, general = builder.build(plan), plain._general(plan)
        _check(fast, plan, rows, form)
        _check(general, plan, rows, form)
        if previous is not None and step < 3:
            assert fast.sampled.rows is previous.sampled.rows
        previous = fast


def test_form_depends_on_start_and_count_only() -> None:
    policy = MLAFormPolicy.from_widths(512, 64, 128, 128)
    assert policy.break_even == pytest.approx(170.67, abs=0.01)
    assert not policy.absorbed(0, 1) and not policy.absorbed(0, 4000)
    assert policy.absorbed(100_000, 170) and not policy.absorbed(100_000, 171)
    assert policy.absorbed(113, 113) and not policy.absorbed(114, 114)
    assert MLAFormPolicy(deterministic=True).absorbed(0, 4000)

    def cost(start: int, count: int, absorbed: bool) -> float:
        seen = count * (start + count / 2)
        built = count if absorbed else start + count
        return built * 512 * 256 + seen * (1088 if absorbed else 320)

    for start, count in np.random.default_rng(0).integers(1, 1000, (200, 2)).tolist():
        assert policy.absorbed(start, count) == (cost(start, count, True) < cost(start, count, False))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": [1, 2]},
        {"counts": [2, 1], "slots": [1, 2, 3], "input_ids": [5]},
        {"input_ids": []},
        {"starts": [1, 500]},
        {"samples": [True]},
        {"counts": [1, 0], "slots": [1], "input_ids": []},
    ],
)
def test_contradictory_plans_are_refused(change: dict) -> None:
    fields = {
        "number": 9,
        "rows": [0, 1],
        "starts": [1, 1],
        "counts": [1, 2],
        "samples": [True, True],
        "slots": [1, 2, 3],
        "num_decodes": 1,
        "input_ids": [5, 6],
    }
    rows = _rows()
    builder = BatchBuilder(rows, 1, MLAFormPolicy(), STREAM)
    builder.build(StepPlan(**fields))
    table = rows.slot_table.clone()
    with pytest.raises(ValueError, match=r"plan 9|grows to"):
        builder.build(StepPlan(**{**fields, **change}))
    assert torch.equal(rows.slot_table, table)


@pytest.mark.parametrize("behind", [-1, 0, 5])
def test_slots_beyond_the_width_of_a_row_are_refused(behind: int) -> None:
    """torch writes a single value into an empty slice without a word."""
    rows = _rows()
    start = rows.width + behind
    table = rows.slot_table.clone()
    count = max(1, 1 - behind)
    with pytest.raises(ValueError, match=f"row 2: tokens up to {start + count} exceed the row's width {rows.width}"):
        rows.apply([], [], [RowWrite(2, start, [7] * count)])
    new = NewRow(2, "r2", [1] * (start + 9), 1, [7] * (start + count), SamplingParams(), 0, frozenset())
    with pytest.raises(ValueError, match=f"row 2: tokens up to {start + count} exceed the row's width {rows.width}"):
        rows.apply([], [new], [])
    assert torch.equal(rows.slot_table, table)


def test_pure_decode_that_contradicts_itself_is_refused() -> None:
    builder = BatchBuilder(_rows(), 1, MLAFormPolicy(), STREAM)
    with pytest.raises(ValueError, match="plan 1"):
        builder.build(StepPlan(1, [0, 1], [1], [1, 1], [True, True], [1, 2], 2))
    with pytest.raises(ValueError, match="row 1 grows to"):
        builder.build(StepPlan(1, [0, 1], [1, 9999], [1, 1], [True, True], [1, 2], 2))
