"""Pauses of generation: no computation, no lost requests, and a weight update may replace the weights in the middle of
answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.frontend.pausing import PauseMode, Pausing
from tests.distributed.engine import test_weight_updates
from tests.distributed.engine.test_weight_updates import FORMS, SAMPLING, checkpoints, open_engine  # noqa: F401

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(2)]
PROMPTS = test_weight_updates.PROMPTS[1:4]
MANY = 440
STILL = 0.3
"""Seconds in which an engine without a pause generates many tokens."""


async def collect(engine: Engine, prompt: list[int], pieces: list[int], **more: Any) -> dict[str, Any]:
    """The last output of a stream; the number of tokens so far goes to `pieces`."""
    stream: Any = await engine.async_generate(input_ids=prompt, sampling_params={**SAMPLING, **more}, stream=True)
    output: dict[str, Any] = {}
    async for output in stream:
        pieces.append(len(output["output_ids"]))
    return output


async def begun(pieces: list[int], task: asyncio.Task[Any]) -> None:
    while not pieces and not task.done():
        await asyncio.sleep(0.002)


async def call(engine: Engine, work: Any) -> Any:
    """Runs a coroutine on the engine's own loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, engine._loop.loop))


async def settled(engine: Engine, pieces: list[list[int]]) -> list[int]:
    """Tokens of each request, including outputs in flight: a scheduler's answer arrives after its outputs, which then
    reach the streams within a few turns of both event loops."""
    await call(engine, engine._frontend.client.call("internal_state"))
    for _ in range(20):
        await call(engine, asyncio.sleep(0))
    return [numbers[-1] if numbers else 0 for numbers in pieces]


async def paused_in_the_middle(
    engine: Engine, mode: PauseMode, work: Any = None, many: int = MANY
) -> list[dict[str, Any]]:
    """Outputs of requests of `many` tokens that run when generation pauses, and of one that arrives during the
    pause."""
    for _ in range(20):  # on a busy machine requests may end before the pause arrives
        outputs = await attempt(engine, mode, work, many)
        if outputs is None:
            continue
        if mode != "retract" or work is not None or any(o["meta_info"]["num_retractions"] for o in outputs):
            return outputs
    raise AssertionError("no pause found a request running")


async def attempt(engine: Engine, mode: PauseMode, work: Any, many: int) -> list[dict[str, Any]] | None:
    pausing, pieces = Pausing(engine._frontend), [[] for _ in PROMPTS]
    tasks = [asyncio.create_task(collect(engine, p, n, max_new_tokens=many)) for p, n in zip(PROMPTS, pieces)]
    await begun(pieces[0], tasks[0])
    waiting = await call(engine, pausing.pause(mode))
    ended = await asyncio.gather(*tasks) if mode == "abort" or not waiting else []
    before = await settled(engine, pieces)
    aborted = any(output["meta_info"]["finish_reason"]["type"] == "abort" for output in ended)
    if not aborted and (mode == "abort" or not any(0 < count < many for count in before)):
        # every request had ended or had not begun: the frontend also counts these requests as waiting
        await call(engine, pausing.resume())
        await asyncio.gather(*tasks)
        return None
    late = asyncio.create_task(collect(engine, PROMPTS[0], []))
    await asyncio.sleep(STILL)
    assert [numbers[-1] if numbers else 0 for numbers in pieces] == before and not late.done(), "nothing is computed"
    states = await call(engine, engine._frontend.client.call("internal_state"))
    assert all(state["paused"] for state in states) and engine.health().alive
    if work is not None:
        await work()
    assert await call(engine, pausing.resume())
    return list(await asyncio.gather(*tasks, late))


@pytest.mark.parametrize(
    "form",
    ["one rank", "dp2", *(pytest.param(form, marks=pytest.mark.exhaustive) for form in ("two replicas", "tp2"))],
)
def test_answers_are_those_without_a_pause(form: str, checkpoints: dict[str, Path]) -> None:  # noqa: F811
    many = 120 if form == "dp2" else MANY  # a step of several attention groups takes longer
    with open_engine(checkpoints["old"], **FORMS[form]) as engine:
        expected: Any = engine.generate(input_ids=PROMPTS, sampling_params={**SAMPLING, "max_new_tokens": many})
        for mode in ("in_place", "retract"):
            outputs = asyncio.run(paused_in_the_middle(engine, mode, many=many))  # type: ignore[arg-type]
            for output, want in zip(outputs, expected):
                assert output["output_ids"] == want["output_ids"], (form, mode)
            assert outputs[-1]["output_ids"] == expected[0]["output_ids"][: SAMPLING["max_new_tokens"]]
            assert mode == "retract" or not any(output["meta_info"]["num_retractions"] for output in outputs)
        aborted = asyncio.run(paused_in_the_middle(engine, "abort", many=many))
        kinds = [output["meta_info"]["finish_reason"]["type"] for output in aborted]
        assert "abort" in kinds[:-1] and kinds[-1] == "length"
        assert engine.flush_cache()
        engine.continue_generation()  # while the engine runs


def test_a_request_that_waits_is_aborted_and_the_cache_is_flushed(checkpoints: dict[str, Path]) -> None:  # noqa: F811
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, engine.flush_cache), "no request holds KV"
        engine.abort_request("", abort_all=True)

    with open_engine(checkpoints["old"]) as engine:
        outputs = asyncio.run(paused_in_the_middle(engine, "retract", work))
        assert {output["meta_info"]["finish_reason"]["type"] for output in outputs if output} == {"abort"}


def test_weights_are_replaced_in_the_middle_of_answers(checkpoints: dict[str, Path]) -> None:  # noqa: F811
    """The tokens after the pause are those of the new weights, given the tokens before it."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        done = await loop.run_in_executor(
            None, lambda: engine.update_weights_from_disk(str(checkpoints["new"]), weight_version="new")
        )
        assert done[0], done

    sampling = {**SAMPLING, "max_new_tokens": MANY}
    with open_engine(checkpoints["old"]) as engine:
        old: Any = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
        outputs = asyncio.run(paused_in_the_middle(engine, "in_place", work))
        mixed = 0
        for prompt, output, before in zip(PROMPTS, outputs, old):
            tokens = output["output_ids"]
            same = next((i for i, pair in enumerate(zip(tokens, before["output_ids"])) if pair[0] != pair[1]), MANY)
            mixed += 0 < same < MANY
            # a request that ended before the pause has the old weights only
            assert output["meta_info"]["weight_version"] == "new" or same == MANY
            first = max(0, same - 1)
            again: Any = engine.generate(
                input_ids=prompt + tokens[:same], sampling_params={**SAMPLING, "max_new_tokens": MANY - same}
            )
            assert again["output_ids"] == tokens[same:], first
        assert mixed, "no request had tokens of both weights"
        late: Any = engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)
        assert outputs[-1]["output_ids"] == late["output_ids"]
