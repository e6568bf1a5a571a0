"""Steps run before READY, so that nothing is compiled, loaded or started by the first request."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.types import NewRow, RowWrite, SamplingParams, Speculation, StepPlan
from moe_engine.worker.runner import ModelRunner

_ROW = 0
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9)
_GREEDY = SamplingParams(temperature=0.0)


def warm_up(runner: ModelRunner, *, num_tokens: int = 32) -> None:
    """Runs a prompt, a chunk behind it and a decode, greedily and sampled, all in the dummy page; leaves no trace."""
    count = max(1, min(num_tokens, runner.rows.context_len - 3))
    decode = StepPlan(number=-1, rows=[_ROW], starts=[count + 2], counts=[1], samples=[True], slots=[0], num_decodes=1)
    for sampling in (_GREEDY, _SAMPLED):
        runner.execute(_plan(0, count, new=_request(count, sampling)))
        runner.execute(_plan(count, 2))
        runner.execute(decode)
        if runner.speculation is not None:
            _warm_up_drafts(runner, count, sampling)
    runner.execute(StepPlan(number=-1, finished_rows=[_ROW]))
    runner.rows.last_token.zero_()
    runner.kv_pool.clear_dummy_page()
    runner.stream.synchronize()


def _warm_up_drafts(runner: ModelRunner, count: int, sampling: SamplingParams) -> None:
    """A prompt that the drafter follows, and steps that draft and verify."""
    assert runner.speculation is not None
    config = runner.speculation.config
    runner.execute(replace(_plan(0, count, new=_request(count, sampling)), speculation=Speculation(follow=True)))
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
        runner.execute(plan)


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
