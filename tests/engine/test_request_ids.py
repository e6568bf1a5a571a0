"""Request ids: a client may reuse an id as soon as its request has ended, and gets the new request's output."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.core import messages
from moe_engine.errors import InputError
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.generate_input import GenerateInput
from tests.engine.delayed_core import STOP, TOKENIZER, DelayedCore, front_end, words_of

KINDS = st.sampled_from(("stop", "length", "leave", "abort"))


def asking(rid: str | None, number: int, **sampling: Any) -> GenerateInput:
    return GenerateInput(input_ids=[number], rid=rid, sampling_params={"max_new_tokens": 9, **sampling}, stream=True)


def expected(number: int, length: int) -> str:
    tokens = TOKENIZER.encode(words_of([number]), False)
    return TOKENIZER.decode([tokens[i % len(tokens)] for i in range(length)])


async def answer(frontend: Frontend, request: GenerateInput) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async with aclosing(frontend.stream(request)) as chunks:
        async for chunk in chunks:
            last = chunk
    return last


async def one(frontend: Frontend, rid: str, number: int, kind: str, pause: int) -> None:
    """A request of a sequential client, which checks its answer. `pause`: pieces until the client disconnects or
    aborts."""
    if kind == "stop":
        out = await answer(frontend, asking(rid, number, stop=STOP, max_new_tokens=100))
        assert out["text"] == words_of([number]).partition(STOP)[0]
        assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": STOP}
    elif kind == "length":
        out = await answer(frontend, asking(rid, number))
        assert out["text"] == expected(number, 9) and out["meta_info"]["finish_reason"]["type"] == "length"
    else:
        finish = None
        async with aclosing(frontend.stream(asking(rid, number, max_new_tokens=10000))) as chunks:
            async for out in chunks:
                assert out["text"] == expected(number, len(out["output_ids"])) or "\ufffd" in out["text"]
                finish = out["meta_info"]["finish_reason"]
                if len(out["output_ids"]) >= pause and kind == "leave":
                    return
                if len(out["output_ids"]) >= pause:
                    frontend.abort(rid, reason=f"enough of {number}")
        assert finish is not None and finish["message"] == f"enough of {number}"
    assert out["meta_info"]["id"] == rid


async def test_sequential_client_reuses_one_id_with_stop_strings(tmp_path: Path) -> None:
    async with front_end(tmp_path) as (frontend, client, core):
        for number in range(60):
            await one(frontend, "same", number, "stop", 0)
        assert len({request.rid for request in core.received}) == 60
        await settled(core, frontend)
        assert not client._inboxes


@given(st.lists(st.lists(st.tuples(KINDS, st.integers(1, 4)), max_size=8), min_size=1, max_size=4))
@settings(max_examples=25)
def test_retries_after_every_kind_of_ending_beside_others(clients: list[list[tuple[str, int]]]) -> None:
    """Each client is sequential and reuses its id; one id is a prefix of another."""

    async def run(folder: Path) -> None:
        async with front_end(folder) as (frontend, client, core):

            async def sequential(index: int, script: list[tuple[str, int]]) -> None:
                for turn, (kind, pause) in enumerate(script):
                    await one(frontend, f"c{index}", 100 * index + turn, kind, pause)

            await asyncio.gather(*(sequential(i, script) for i, script in enumerate(clients)))
            await settled(core, frontend)
            assert not client._inboxes and all(load.num_requests == 0 for load in client._router.loads)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


async def settled(core: DelayedCore, frontend: Frontend) -> None:
    """The core has ended all requests and the frontend has received the ends."""
    assert not frontend._live
    async with asyncio.timeout(240):
        while core.live:
            await asyncio.sleep(0.001)
        await frontend.client.call("internal_state")  # after all messages sent before


async def test_an_id_that_is_still_running_is_refused_copies_and_batches_too(tmp_path: Path) -> None:
    async with front_end(tmp_path) as (frontend, _, core):
        long = {"max_new_tokens": 10000, "n": 2}
        copies = frontend.stream(GenerateInput(input_ids=[3] * 40, rid="r", sampling_params=long))
        await anext(copies)
        for rid, n, count in (("r_0", 1, 1), ("r_1", 1, 1), ("r", 2, 1), ("r", 1, 2)):
            ids: Any = [5] if count == 1 else [[5]] * count
            with pytest.raises(InputError, match="is still running"):
                await frontend.generate(GenerateInput(input_ids=ids, rid=rid, sampling_params={"n": n}))
        assert {request.prompt_ids[0] for request in core.received} == {3}
        assert (await answer(frontend, asking("r", 7)))["text"] == expected(7, 9)  # no sequence of it is called "r"
        await copies.aclose()
        await answer(frontend, asking("r_1", 8))


async def test_two_requests_with_one_id_at_the_same_moment_run_once(tmp_path: Path) -> None:
    async with front_end(tmp_path) as (frontend, _, core):
        both = await asyncio.gather(
            *(answer(frontend, asking("r", number)) for number in range(2)), return_exceptions=True
        )
        assert sorted(isinstance(outcome, InputError) for outcome in both) == [False, True]
        assert len(core.received) == 1


async def test_abort_matches_id_prefixes_and_waiting_copies(tmp_path: Path) -> None:
    """Internal ids end in numbers that clients did not choose: "a-1" is not a client's id here."""
    async with front_end(tmp_path) as (frontend, _, core):
        sampling = {"max_new_tokens": 10000, "n": 3}
        ends: dict[str, Any] = {}

        async def ask(rid: str, **fields: Any) -> None:
            outs: Any = await frontend.generate(GenerateInput(rid=rid, **fields))
            for out in outs if isinstance(outs, list) else [outs]:
                ends[out["meta_info"]["id"]] = out["meta_info"]["finish_reason"]["message"], len(out["output_ids"])

        tasks = [
            asyncio.create_task(ask("a", input_ids=[1] * 40, sampling_params=sampling)),
            asyncio.create_task(ask("ab", input_ids=[2], sampling_params=sampling)),
            asyncio.create_task(ask("b", input_ids=[[3], [4]], sampling_params={"max_new_tokens": 10000})),
        ]
        await asyncio.sleep(0)
        frontend.abort("a_", reason="first")  # all three copies of "a", before they are sent to the core
        await tasks[0]
        assert ends == {f"a_{copy}": ("first", 0) for copy in range(3)}
        while len(core.received) < 5:
            await asyncio.sleep(0.001)
        for private in [request.rid for request in core.received]:
            frontend.abort(f"{private}"[:-1] + "-", reason="never")
            frontend.abort(private, reason="never")
        frontend.abort("b_1", reason="second")
        frontend.abort("a", reason="third")
        await tasks[1]
        frontend.abort(all=True, reason="last")
        await tasks[2]
        found = {rid: message for rid, (message, _) in ends.items()}
        copies = {f"{rid}_{copy}": text for rid, text in (("a", "first"), ("ab", "third")) for copy in range(3)}
        assert found == {**copies, "b_0": "last", "b_1": "second"}
        assert len(core.aborted) == len(set(core.aborted)) == 5


async def test_a_copy_that_waits_is_aborted_alone(tmp_path: Path) -> None:
    async with front_end(tmp_path) as (frontend, _, core):
        task = asyncio.create_task(
            frontend.generate(GenerateInput(rid="r", input_ids=[6] * 40, sampling_params={"max_new_tokens": 5, "n": 3}))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        frontend.abort("r_1")
        outs: Any = await task
        kinds = [out["meta_info"]["finish_reason"]["type"] for out in outs]
        assert kinds == ["length", "abort", "length"]
        assert [len(out["output_ids"]) for out in outs] == [5, 0, 5] and len(core.received) == 2


async def test_an_id_is_free_after_an_error_and_after_a_move_to_another_group(tmp_path: Path) -> None:
    async with front_end(tmp_path, 2) as (frontend, client, core):
        request = asking("r", 4, max_new_tokens=40)
        request.routed_dp_rank = 1
        task = asyncio.create_task(answer(frontend, request))
        while not core.sent.get(next(iter(core.live), "")):
            await asyncio.sleep(0.001)
        core.core.send(messages.GroupsLost([1], "DP1 was killed"))
        core.live = {rid: entry for rid, entry in core.live.items() if entry[1] == 0}
        assert (await task)["text"] == expected(4, 40)
        first, again = core.received
        assert again.rid == first.rid and again.seed == first.seed and again.generated_ids
        refused = asking("r", 4)
        refused.routed_dp_rank = 9
        with pytest.raises(InputError, match="routed_dp_rank"):
            await answer(frontend, refused)
        assert (await answer(frontend, asking("r", 5)))["text"] == expected(5, 9)
        await settled(core, frontend)
        assert not client._inboxes
