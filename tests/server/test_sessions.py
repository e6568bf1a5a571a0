"""Sessions: prompts of continued requests against token lists of a client without sessions; limits; the endpoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from moe_engine.core.messages import AddRequest
from moe_engine.errors import InputError
from moe_engine.frontend.generation import Generation, Place
from moe_engine.frontend.session_params import SessionParams
from moe_engine.frontend.session_turns import TURN_TOKENS
from moe_engine.frontend.sessions import Sessions
from moe_engine.types import SamplingParams
from tests.server.fake_engine import FakeClient
from tests.server.harness import in_process, post, talk

BOS = 3


def generation(rid: str, prompt: list[int]) -> Generation:
    request = AddRequest(rid + "-1", prompt, {}, 8, 0)
    return Generation(request, SamplingParams(), Place(rid))


class Client:
    """Keeps the tokens of each request, as a client without sessions does."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.turns: dict[str, tuple[list[int], list[int]]] = {}

    def run(self, params: SessionParams, rid: str, ids: list[int], output: list[int]) -> list[int]:
        prompt, joined = self.sessions.join(params, ids)
        one = generation(rid, prompt)
        one.session = joined
        self.sessions.begin(one)
        one.output_ids += output
        one.finish = {"type": "stop"}
        self.sessions.end(one)
        self.sessions.end(one)
        self.turns[rid] = prompt, output
        return prompt


def test_prompts_equal_those_that_a_client_would_put_together() -> None:
    """Random trees of appends, branches, offsets and dropped outputs; the size counts the kept tokens."""
    draw = random.Random(random.getrandbits(32))
    for _ in range(20):
        sessions = Sessions(BOS)
        client, name = Client(sessions), sessions.open()
        for number in range(draw.randrange(1, 25)):
            ids = [draw.randrange(10, 99) for _ in range(draw.randrange(1, 6))]
            if draw.random() < 0.3:
                ids = [BOS, *ids]
            params, before = SessionParams(id=name), list[int]()
            if client.turns and draw.random() < 0.9:
                params.rid = draw.choice(list(client.turns))
                prompt, output = client.turns[params.rid]
                params.drop_previous_output = draw.choice([None, False, True])
                before = prompt if params.drop_previous_output else prompt + output
                params.offset = draw.choice([None, 0, draw.randrange(1, 40), -1])
                before = before[: params.offset] if params.offset else before
            rid = draw.choice([f"r{number}", draw.choice([*client.turns, "r"])])
            expected = before + (ids[1:] if before and ids[0] == BOS else ids)
            assert client.run(params, rid, ids, [draw.randrange(10, 99) for _ in range(draw.randrange(4))]) == expected
        session = sessions._open[name]
        assert sessions.size == session.size > 0
        sessions.close(name)
        assert sessions.size == len(sessions) == 0


def test_replace_forgets_what_follows_and_names_what_runs() -> None:
    sessions = Sessions()
    client, name = Client(sessions), sessions.open("s")
    client.run(SessionParams(id=name), "a", [1, 2], [3])
    client.run(SessionParams(id=name, rid="a"), "b", [4], [5])
    client.run(SessionParams(id=name, rid="b"), "c", [6], [7])
    kept = sessions.size
    prompt, joined = sessions.join(SessionParams(id=name, rid="b"), [8])
    running = generation("d", prompt)
    running.session = joined
    assert sessions.begin(running) == []
    with pytest.raises(InputError, match="'d' is running"):
        sessions.join(SessionParams(id=name, rid="d"), [9])
    running.output_ids += [20, 21]
    prompt, joined = sessions.join(SessionParams(id=name, rid="d", replace=True), [9])
    assert prompt == [1, 2, 3, 4, 5, 8, 20, 21, 9]
    prompt, joined = sessions.join(SessionParams(id=name, rid="a", replace=True), [9])
    assert prompt == [1, 2, 3, 9]
    new = generation("e", prompt)
    new.session = joined
    assert sessions.begin(new) == ["d"], "aborted by the frontend"
    for one in (running, new):
        one.finish = {"type": "abort"}
        sessions.end(one)
    for gone in "bcd":
        with pytest.raises(InputError, match=f"has no request '{gone}'"):
            sessions.join(SessionParams(id=name, rid=gone), [9])
    assert sessions.size == kept - (TURN_TOKENS + 2) - 1
    sessions.join(SessionParams(id=name, rid="e"), [9])
    prompt, joined = sessions.join(SessionParams(id=name, replace=True), [9])
    first = generation("f", prompt)
    first.session = joined
    sessions.begin(first)
    assert prompt == [9] and sessions.size == TURN_TOKENS + 1


def test_a_streaming_session_only_appends() -> None:
    sessions = Sessions(BOS)
    client, name = Client(sessions), sessions.open(streaming=True)
    client.run(SessionParams(id=name), "a", [BOS, 1], [2])
    assert client.run(SessionParams(id=name), "b", [BOS, 4], [5]) == [BOS, 1, 2, 4]
    for wrong in ({"replace": True}, {"offset": 2}, {"drop_previous_output": True}):
        with pytest.raises(InputError, match="only appends"):
            sessions.join(SessionParams(id=name, **wrong), [1])
    prompt, joined = sessions.join(SessionParams(id=name), [6])
    lost = generation("c", prompt)
    lost.session = joined
    sessions.begin(lost)
    second = generation("d", prompt)
    second.session = sessions.join(SessionParams(id=name), [7])[1]
    with pytest.raises(InputError, match="is running"):
        sessions.begin(second)
    sessions.end(second)
    lost.finish = {"type": "abort"}
    sessions.end(lost)
    assert client.run(SessionParams(id=name), "e", [8], []) == [BOS, 1, 2, 4, 5, 8], "the aborted request left nothing"


def test_limits() -> None:
    now = 0.0
    sessions = Sessions(max_tokens=3 * TURN_TOKENS, max_sessions=4, clock=lambda: now)
    client = Client(sessions)
    short, long = sessions.open("short", timeout=5), sessions.open("long")
    client.run(SessionParams(id=short), "a", [1], [])
    client.run(SessionParams(id=long), "b", [1], [])
    with pytest.raises(InputError, match="'long' is open already"):
        sessions.open("long")
    now = 4
    sessions.join(SessionParams(id=short, rid="a"), [1])
    now = 8
    sessions.join(SessionParams(id=short, rid="a"), [1])
    now = 14
    with pytest.raises(InputError, match="'short' is not open; it was closed, timed out"):
        sessions.join(SessionParams(id=short, rid="a"), [1])
    assert len(sessions) == 1 and sessions.open("short") == "short"
    client.run(SessionParams(id="short"), "c", [1], [2])
    client.run(SessionParams(id="short"), "d", [1], [2])
    assert len(sessions) == 1, "the least recently used session was removed"
    for _ in range(9):
        sessions.open()
    assert len(sessions) == 4


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"id": "x"}, "session_params.id: session 'x' is not open"),
        ({"rid": "x"}, "session_params.id: is required"),
        ({"id": 5}, "session_params.id: expected a string"),
        ({"id": "s", "offset": 1.5}, "session_params.offset: expected an integer"),
        ({"id": "s", "rid": "x"}, "session 's' has no request 'x'"),
        ([{"id": "s"}], "session_params: a list is for a batch"),
    ],
)
async def test_wrong_params(params: Any, words: str) -> None:
    async with in_process(FakeClient()) as http:
        await http.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s"})
        answer = await http.post("/generate", json={"text": "a", "session_params": params})
    assert answer.status_code == 400 and words in answer.text


def with_session(work: Callable[[httpx.AsyncClient, FakeClient, str], Any], **fields: Any) -> Any:
    client = FakeClient()

    async def session(http: httpx.AsyncClient) -> Any:
        name = (await http.post("/open_session", json={"capacity_of_str_len": 1000, **fields})).json()
        return await work(http, client, name)

    return talk(client, session)


def test_requests_over_http() -> None:
    async def work(http: httpx.AsyncClient, client: FakeClient, name: str) -> None:
        async def ask(path: str, params: dict[str, Any], **body: Any) -> Any:
            answer = await http.post(path, json={**body, "session_params": {"id": name, **params}})
            assert answer.status_code == 200, answer.text
            return answer.json()

        ids = client.tokenizer.encode("Hello world")
        first = await ask("/generate", {}, text="Hello world", sampling_params={"max_new_tokens": 3})
        assert client.requests[0].prompt_ids == ids
        second = await ask("/generate", {"rid": first["meta_info"]["id"]}, input_ids=[7, 8], return_logprob=True,
                           logprob_start_len=len(ids) + 3)  # fmt: skip
        whole = [*ids, *first["output_ids"], 7, 8]
        assert client.requests[1].prompt_ids == whole and second["meta_info"]["prompt_tokens"] == len(whole)
        third = await ask("/v1/completions", {"rid": second["meta_info"]["id"]}, prompt=[9], max_tokens=2)
        assert client.requests[2].prompt_ids == [*whole, *second["output_ids"], 9]
        await ask(
            "/v1/chat/completions", {"rid": third["id"], "offset": 4}, messages=[{"role": "user", "content": "x"}]
        )
        assert client.requests[3].prompt_ids[:4] == whole[:4]
        batch = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1}}
        params = [{"id": name, "rid": first["meta_info"]["id"]}, None]
        answer = (await http.post("/generate", json={**batch, "session_params": params})).json()
        assert [one["meta_info"]["prompt_tokens"] for one in answer] == [len(ids) + 3 + 1, 1]
        too_long = {"input_ids": [5] * 249, "session_params": {"id": name, "rid": second["meta_info"]["id"]}}
        refused = await http.post("/generate", json=too_long)
        assert refused.status_code == 400 and "is longer than the model's context length" in refused.text
        assert (await http.post("/close_session", json={"session_id": name})).status_code == 200
        assert (await http.post("/close_session", json={"session_id": name})).status_code == 200
        assert (await http.post("/generate", json={"text": "a", "session_params": {"id": name}})).status_code == 400

    with_session(work)


def test_a_replaced_request_is_aborted() -> None:
    async def work(http: httpx.AsyncClient, client: FakeClient, name: str) -> None:
        client.delay = 0.01
        body = {"text": "a", "session_params": {"id": name}, "rid": "slow", "sampling_params": {"ignore_eos": True}}
        slow = asyncio.create_task(http.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 200}}))
        while not client.running:
            await asyncio.sleep(0.01)
        params = {"id": name, "rid": "slow"}
        refused = await http.post("/generate", json={"text": "b", "session_params": params})
        assert refused.status_code == 400 and "is running" in refused.text
        new = {"text": "b", "session_params": {**params, "replace": True}, "sampling_params": {"max_new_tokens": 1}}
        assert (await http.post("/generate", json=new)).status_code == 200
        assert client.aborts == ["slow"]
        slow.cancel()

    with_session(work)


def test_a_streaming_session_over_http() -> None:
    async def work(http: httpx.AsyncClient, client: FakeClient, name: str) -> None:
        body = {"input_ids": [5], "session_params": {"id": name}, "sampling_params": {"max_new_tokens": 1}}
        answers = [(await http.post("/generate", json=body)).json() for _ in range(3)]
        assert [one["meta_info"]["prompt_tokens"] for one in answers] == [1, 3, 5]
        refused = await http.post("/generate", json={**body, "sampling_params": {"n": 2}})
        assert refused.status_code == 400 and "is running" in refused.text
        assert (await http.post("/generate", json=body)).json()["meta_info"]["prompt_tokens"] == 7, (
            "nothing is left over"
        )

    with_session(work, streaming=True)


def test_an_open_id_is_refused() -> None:
    async def work(http: httpx.AsyncClient, client: FakeClient, name: str) -> None:
        assert name == "mine"
        again = await http.post("/open_session", json={"session_id": "mine"})
        assert again.status_code == 400 and "is open already" in again.text

    with_session(work, session_id="mine", timeout=60)
    assert post(FakeClient(), "/open_session", {"timeout": 0}).status_code == 400
