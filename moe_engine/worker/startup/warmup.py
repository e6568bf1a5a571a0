"""Warm-up: steps before READY, so that the first request triggers no compilation, loading or thread start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.kernels.warmup_sizes import PREFIX, ladder
from moe_engine.types import NewRow, RowWrite, SamplingParams, Speculation, StepPlan
from moe_engine.worker.model_runner import ModelRunner

NUM_TOKENS = 32
"""Prompt tokens of the warm-up, if steps may be this large."""
_ROW = 0
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9)
_GREEDY = SamplingParams(temperature=0.0)


def warm_up(runner: ModelRunner, *, num_tokens: int = NUM_TOKENS) -> None:
    """Runs a prompt, a chunk after it and a decode, greedy and sampled, all in the dummy page; restores all state.

    Args:
        num_tokens: max tokens of a step.
    """
    count = max(1, min(num_tokens, runner.rows.context_len - 3))
    chunk = min(2, count)
    start = count + chunk
    decode = StepPlan(number=-1, rows=[_ROW], starts=[start], counts=[1], samples=[True], slots=[0], num_decodes=1)

    def run(plan: StepPlan) -> None:
        runner.execute(runner.shared.for_all_groups(plan))  # every rank of every attention group runs the same plan

    for sampling in (_GREEDY, _SAMPLED):
        run(_plan(0, count, new=_request(count, sampling)))
        run(_plan(count, chunk))
        run(decode)
        if runner.speculation is not None:
            _warm_up_drafts(runner, run, count, sampling)
    run(StepPlan(number=-1, finished_rows=[_ROW]))
    runner.rows.last_token.zero_()
    runner.kv_pool.clear_dummy_page()
    runner.stream.synchronize()


def compile_regions(runner: ModelRunner, regions: CompiledRegions) -> None:
    """Compiles regions for decodes of several tokens; `warm_up` has compiled those of one token."""
    rows = [_ROW, _ROW + 1]
    if runner.rows.max_rows < len(rows) or not regions.serves(len(rows)):
        return
    new = [replace(_request(1, _GREEDY), row=row) for row in rows]
    step = replace(_plan(0, 1), rows=rows, starts=[0, 0], counts=[1, 1], samples=[True, True], slots=[0, 0])
    prompts = replace(step, input_ids=[0, 0], new_rows=new)
    runner.execute(prompts)
    runner.execute(replace(step, starts=[1, 1], num_decodes=len(rows), input_ids=[]))
    if runner.speculation is not None:
        config = runner.speculation.config
        depth = config.num_steps
        runner.execute(replace(prompts, speculation=Speculation(follow=True)))
        reserved = [RowWrite(row, 1, [0] * (2 * config.num_slots(depth))) for row in rows]
        drafts = Speculation(depth, follow=True, reserved=reserved)
        counts = [config.num_nodes(depth)] * len(rows)
        verified = replace(step, starts=[1, 1], counts=counts, slots=[], input_ids=[], num_decodes=len(rows))
        runner.execute(replace(verified, speculation=drafts))
    runner.execute(StepPlan(number=-1, finished_rows=rows))
    runner.rows.last_token.zero_()
    runner.kv_pool.clear_dummy_page()


def warm_sizes(runner: ModelRunner, num_tokens: int, top_k: int = 0) -> int:
    """Runs steps of every size class, for kernels that compile per number of tokens: prompts and chunks of the ladder,
    decodes greedy and sampled. All in the dummy page; restores all state. Returns the number of steps.

    Args:
        num_tokens: of the largest step.
        top_k: of sparse attention: contexts beyond it run too; 0: dense attention.
    """
    rows, count = runner.rows, 0
    follow = Speculation(follow=True) if runner.speculation is not None else None

    def run(plan: StepPlan) -> None:
        nonlocal count
        runner.execute(runner.shared.for_all_groups(plan))
        count += 1

    longest = rows.context_len - 1
    for tokens in ladder(min(num_tokens, longest * rows.max_rows)):
        for prefix in sorted({0, *(min(prefix, max(0, longest - tokens)) for prefix in (PREFIX, top_k))}):
            lens = _cut(tokens, longest - prefix)
            new = [_entering(row, prefix, length, rows.vocab_size) for row, length in enumerate(lens)]
            run(replace(_prompts(new), speculation=follow))
    for num_rows in ladder(rows.max_rows):
        for sampling in (_GREEDY, _SAMPLED):
            new = [_entering(row, 0, 1, rows.vocab_size, sampling) for row in range(num_rows)]
            run(_prompts(new))
            ones, entered = [1] * num_rows, list(range(num_rows))
            run(StepPlan(-1, entered, ones, ones, [True] * num_rows, [0] * num_rows, num_rows))
    runner.execute(runner.shared.for_all_groups(StepPlan(number=-1, finished_rows=list(range(rows.max_rows)))))
    rows.last_token.zero_()
    runner.kv_pool.clear_dummy_page()
    runner.stream.synchronize()
    return count


def _cut(tokens: int, longest: int) -> list[int]:
    """Lengths of prompts of at most `longest` tokens, `tokens` in total."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _entering(row: int, prefix: int, length: int, vocab_size: int, sampling: SamplingParams = _GREEDY) -> NewRow:
    """A request of `length` tokens after a cached prefix; with many different tokens, to reach many experts."""
    tokens = [(7919 * (row + place)) % vocab_size for place in range(prefix + length)]
    return replace(_request(0, sampling), row=row, token_ids=tokens, num_prompt=len(tokens), slots=[0] * prefix)


def _prompts(new: list[NewRow]) -> StepPlan:
    """The prefill step of these requests."""
    inputs = [row.token_ids[len(row.slots) :] for row in new]
    counts = [len(tokens) for tokens in inputs]
    return StepPlan(
        number=-1,
        rows=[row.row for row in new],
        starts=[len(row.slots) for row in new],
        counts=counts,
        samples=[True] * len(new),
        slots=[0] * sum(counts),
        input_ids=[token for tokens in inputs for token in tokens],
        new_rows=new,
    )


def compile_kernels(backends: Backends, shapes: StepShapes) -> int:
    """Compiles every kernel that compiles at first use, for the shapes of a launch; returns the number of calls."""
    calls = (backends.linear.capabilities.warm_up, backends.experts.capabilities.warm_up)
    return sum(warm_up(shapes) for warm_up in calls if warm_up is not None)


def _warm_up_drafts(runner: ModelRunner, run: Callable[[StepPlan], None], count: int, sampling: SamplingParams) -> None:
    """Runs a prompt with draft extend, and steps that draft and verify."""
    assert runner.speculation is not None
    config = runner.speculation.config
    run(replace(_plan(0, count, new=_request(count, sampling)), speculation=Speculation(follow=True)))
    slots = [0] * (2 * config.num_slots(config.num_steps))
    for reserved in ([RowWrite(_ROW, count, slots)], []):
        plan = StepPlan(
            number=-1,
            rows=[_ROW],
            starts=[count],
            counts=[config.num_nodes(config.num_steps)],
            samples=[True],
            num_decodes=1,
            speculation=Speculation(config.num_steps, follow=True, reserved=reserved),
        )
        run(plan)


def _request(num_prompt: int, sampling: SamplingParams) -> NewRow:
    return NewRow(
        row=_ROW,
        rid="warm-up",
        token_ids=[0] * num_prompt,
        num_prompt=num_prompt,
        slots=[],
        sampling=sampling,
        seed=0,
        eos_token_ids=frozenset(),
    )


def _plan(start: int, count: int, new: NewRow | None = None) -> StepPlan:
    return StepPlan(
        number=-1,
        rows=[_ROW],
        starts=[start],
        counts=[count],
        samples=[True],
        slots=[0] * count,
        input_ids=[0] * count,
        new_rows=[new] if new is not None else [],
    )
