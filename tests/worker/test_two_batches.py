"""Split plans: no token is lost, duplicated or reordered, and the halves are balanced within the rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.types import Speculation, StepPlan
from moe_engine.worker.batch.two_batches import find_cut, halves


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_decodes = draw(st.integers(0, 6))
    chunks = draw(st.lists(st.integers(1, 40), min_size=0 if num_decodes else 1, max_size=5))
    counts = [1] * num_decodes + chunks
    num = sum(counts)
    return StepPlan(
        number=7,
        rows=draw(st.permutations(range(len(counts)))),
        starts=draw(st.lists(st.integers(0, 90), min_size=len(counts), max_size=len(counts))),
        counts=counts,
        samples=[True] * num_decodes + draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks))),
        slots=list(range(1000, 1000 + num)),
        num_decodes=num_decodes,
        input_ids=list(range(500, 500 + sum(chunks))),
    )


def tokens_of(plan: StepPlan) -> list[tuple[int, int, int, int | None]]:
    """(row, position, slot, id) of every token; ids of decodes are on the device."""
    slots, ids, found = iter(plan.slots), iter(plan.input_ids), []
    for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts)):
        for position in range(start, start + count):
            found.append((row, position, next(slots), None if i < plan.num_decodes else next(ids)))
    assert next(slots, None) is None and next(ids, None) is None
    return found


@settings(max_examples=300)
@given(plans(), st.sampled_from([0.0, 0.25, 0.48, 0.5]))
def test_halves_are_the_plan(plan: StepPlan, threshold: float) -> None:
    cut = find_cut(plan, threshold)
    if cut is None:
        assert len(plan.rows) < 2 or plan.num_tokens < 2
        return
    first, second = halves(plan, cut)
    assert first.num_tokens == cut.num_tokens and first.num_tokens and second.num_tokens
    assert tokens_of(first) + tokens_of(second) == tokens_of(plan)
    sampled = [row for part in (first, second) for row, samples in zip(part.rows, part.samples) if samples]
    assert sampled == [row for row, samples in zip(plan.rows, plan.samples) if samples]
    assert first.num_decodes + second.num_decodes == plan.num_decodes
    if threshold == 0:
        assert cut.tokens == 0
    if cut.tokens:  # split inside a prompt, in the middle of the tokens
        assert cut.request >= plan.num_decodes and first.num_tokens == plan.num_tokens // 2


def test_plans_that_are_not_split() -> None:
    assert find_cut(StepPlan(number=1), 0.48) is None
    one = StepPlan(number=1, rows=[0], starts=[9], counts=[1], samples=[True], slots=[4], num_decodes=1)
    assert find_cut(one, 0.48) is None
    drafts = StepPlan(
        number=1, rows=[0, 1], starts=[9, 3], counts=[4, 4], samples=[True, True], num_decodes=2,
        speculation=Speculation(3),
    )  # fmt: skip
    assert find_cut(drafts, 0.48) is None
