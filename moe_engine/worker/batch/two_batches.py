"""Two-batch overlap: splits a step into two halves; one computes while the other dispatches. Imports no torch.

The split balances the tokens of the halves: between two requests, or inside a prompt if that is more even. The second
half of a split prompt attends to the first half, which runs before it in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from moe_engine.types import StepPlan


@dataclass(frozen=True)
class Cut:
    """The first half has the requests before `request`, and the first `tokens` of that request."""

    request: int
    tokens: int
    num_tokens: int
    """Tokens of the first half."""


def find_cut(plan: StepPlan, threshold: float) -> Cut | None:
    """The position at which to split a plan; None if it is not split (fewer than two requests or tokens, drafts).

    Args:
        threshold: a prompt is split if halves of whole requests would leave less than this share of the tokens to the
            smaller one; 0 never splits a prompt.
    """
    total = plan.num_tokens
    if plan.speculation is not None or total < 2:
        return None
    before = [0, *accumulate(plan.counts)]
    best = min(range(1, len(plan.rows)), key=lambda i: abs(2 * before[i] - total), default=0)
    if best and min(before[best], total - before[best]) >= threshold * total:
        return Cut(best, 0, before[best])
    middle = next(i for i in range(len(plan.rows)) if before[i + 1] > total // 2)
    inside = total // 2 - before[middle]
    if threshold and middle >= plan.num_decodes and inside:
        return Cut(middle, inside, total // 2)
    return Cut(best, 0, before[best]) if best else None


def halves(plan: StepPlan, cut: Cut) -> tuple[StepPlan, StepPlan]:
    """The two halves of a plan, in its order, without its changes of rows, which are applied earlier."""
    first, second = _take(plan, 0, cut.request), _take(plan, cut.request, len(plan.rows))
    if not cut.tokens:
        return first, second
    prompt, num = _take(plan, cut.request, cut.request + 1), cut.tokens
    head = replace(prompt, counts=[num], samples=[False], slots=prompt.slots[:num], input_ids=prompt.input_ids[:num])
    tail = replace(
        prompt,
        starts=[prompt.starts[0] + num],
        counts=[prompt.counts[0] - num],
        slots=prompt.slots[num:],
        input_ids=prompt.input_ids[num:],
    )
    return _join(first, head), _join(tail, _take(plan, cut.request + 1, len(plan.rows)))


def _take(plan: StepPlan, begin: int, end: int) -> StepPlan:
    """Requests [begin, end)."""
    slot = sum(plan.counts[:begin])
    decodes = max(0, min(end, plan.num_decodes) - begin)
    first_prompt = max(begin, plan.num_decodes)
    ids_begin = sum(plan.counts[plan.num_decodes : first_prompt])
    ids_end = ids_begin + sum(plan.counts[first_prompt:end])
    return StepPlan(
        number=plan.number,
        rows=plan.rows[begin:end],
        starts=plan.starts[begin:end],
        counts=plan.counts[begin:end],
        samples=plan.samples[begin:end],
        slots=plan.slots[slot : slot + sum(plan.counts[begin:end])],
        num_decodes=decodes,
        input_ids=plan.input_ids[ids_begin:ids_end],
    )


def _join(a: StepPlan, b: StepPlan) -> StepPlan:
    """Requests of `a`, then those of `b`; if `b` has decodes, `a` has nothing else."""
    return replace(
        a,
        rows=a.rows + b.rows,
        starts=a.starts + b.starts,
        counts=a.counts + b.counts,
        samples=a.samples + b.samples,
        slots=a.slots + b.slots,
        num_decodes=a.num_decodes + b.num_decodes,
        input_ids=a.input_ids + b.input_ids,
    )
