"""Responses in the background, items and tokens of an input, and inputs that are cut. The oracles are the models of
OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from moe_engine.server.responses.types import InputTokens, ItemList, ResponseObject
from tests.server.harness import make_app, post, talk
from tests.server.test_anthropic import PARSERS, TEXTS, fake
from tests.server.test_responses import ASK, WEATHER
from tests.server.test_schema import conforms

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
LATER = {**ASK, "background": True}


async def ended(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The response at its end; every state before is a valid response."""
    while True:
        response = (await http.get(f"/v1/responses/{name}")).json()
        conforms(response, ResponseObject)
        Response.model_validate(response)
        if response["status"] not in ("queued", "in_progress"):
            return response
        assert response["output"] == [] and response["usage"] is None
        await asyncio.sleep(0.001)


def test_a_response_in_the_background_is_that_of_a_request_that_waits():
    async def session(http: httpx.AsyncClient) -> None:
        begun = (await http.post("/v1/responses", json=LATER)).json()
        assert (begun["status"], begun["background"]) == ("queued", True)
        found = await ended(http, begun["id"])
        waited = (await http.post("/v1/responses", json=ASK)).json()
        assert found["output"][0]["content"] == waited["output"][0]["content"] and found["usage"] == waited["usage"]
        assert (found["status"], found["created_at"]) == ("completed", begun["created_at"])
        after = await http.post("/v1/responses", json={**ASK, "previous_response_id": begun["id"]})
        assert after.json()["usage"]["input_tokens"] > found["usage"]["input_tokens"]
        again = await http.post(f"/v1/responses/{begun['id']}/cancel")
        assert again.json() == found
        sync = await http.post(f"/v1/responses/{waited['id']}/cancel")
        assert sync.status_code == 400 and "not in the background" in sync.json()["error"]["message"]
        assert (await http.post("/v1/responses/resp_x/cancel")).status_code == 404

    talk(fake("</think>Hello"), session, **PARSERS)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_cancel_and_delete_end_a_response(seconds: float):
    client = fake()
    client.delay = 0.01

    async def session(http: httpx.AsyncClient) -> None:
        body = {**LATER, "ignore_eos": True, "max_output_tokens": 2000}
        first, second = [(await http.post("/v1/responses", json=body)).json()["id"] for _ in range(2)]
        await asyncio.sleep(seconds)
        early = await http.post("/v1/responses", json={**ASK, "previous_response_id": first})
        assert early.status_code == 400 and "has not ended" in early.json()["error"]["message"]
        assert (await http.get(f"/v1/responses/{first}/input_items")).status_code == 400
        same = await http.post("/v1/responses", json={**body, "rid": first.removeprefix("resp_")})
        assert same.status_code == 400 and same.json()["error"]["param"] == "rid"
        cancelled = (await http.post(f"/v1/responses/{first}/cancel")).json()
        Response.model_validate(cancelled)
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        assert await ended(http, first) == cancelled
        assert (await http.delete(f"/v1/responses/{second}")).status_code == 200
        assert (await http.get(f"/v1/responses/{second}")).status_code == 404
        assert not client.running and len(client.closed_early) == len(client.requests)

    talk(client, session, **PARSERS)


def test_the_end_of_the_server_cancels():
    client = fake()
    client.mute = True

    async def main() -> None:
        app = make_app(client, **PARSERS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            names = [(await http.post("/v1/responses", json=LATER)).json()["id"] for _ in range(2)]
            while len(client.running) < 2:
                await asyncio.sleep(0)
            await app.state.server.close()
            assert not client.running
            assert [(await ended(http, name))["status"] for name in names] == ["cancelled"] * 2

    asyncio.run(main())


def test_a_failure_in_the_background_is_stored():
    client = fake()
    client.fail_after = 2

    async def session(http: httpx.AsyncClient) -> dict[str, Any]:
        return await ended(http, (await http.post("/v1/responses", json=LATER)).json()["id"])

    failed = talk(client, session, **PARSERS)
    assert failed["status"] == "failed" and "SIGKILL" in failed["error"]["message"]


def test_items_of_an_input():
    given = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_mine", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]

    async def session(http: httpx.AsyncClient) -> None:
        name = (await http.post("/v1/responses", json={**ASK, "input": given, "tools": [WEATHER]})).json()["id"]
        path = f"/v1/responses/{name}/input_items"
        whole = (await http.get(path, params={"order": "asc"})).json()
        conforms(whole, ItemList)
        for item in whole["data"]:
            ITEM.validate_python(item)
        kinds = [item.get("type", "message") for item in given]
        assert [item["type"] for item in whole["data"]] == kinds and not whole["has_more"]
        assert whole["data"][1]["id"] == "rs_mine" and len({item["id"] for item in whole["data"]}) == len(given)
        assert whole["data"][2]["content"][0]["text"] == "I look."
        first = (await http.get(path, params={"limit": 4})).json()
        rest = (await http.get(path, params={"limit": 4, "after": first["last_id"]})).json()
        assert (len(first["data"]), first["has_more"], rest["has_more"]) == (4, True, False)
        assert first["data"] + rest["data"] == whole["data"][::-1]
        assert (await http.get(path, params={"after": "msg_x"})).json()["error"]["param"] == "after"
        assert (await http.get(path, params={"limit": 0})).status_code == 400
        assert (await http.get("/v1/responses/resp_x/input_items")).status_code == 404
        streamed = await http.get(f"/v1/responses/{name}", params={"stream": "true"})
        assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "stream"

    talk(fake("</think>Hello"), session, **PARSERS)


@pytest.mark.parametrize("text", ["", *TEXTS.values()], ids=["empty", *TEXTS])
def test_items_of_a_conversation(text: str):
    """They are everything that a response was made from: sent as an input, they give the same prompt."""
    client = fake(text)
    body = {**ASK, "tools": [WEATHER], "top_logprobs": 1}
    more = [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "And?"}]

    async def session(http: httpx.AsyncClient) -> list[Any]:
        earlier = None
        for question in ("Weather?", more, "Bye"):
            asked = {**body, "input": question, "previous_response_id": earlier}
            earlier = (await http.post("/v1/responses", json=asked)).json()["id"]
        path, found, page = f"/v1/responses/{earlier}/input_items", [], {"last_id": None, "has_more": True}
        while page["has_more"]:
            after = {"after": page["last_id"]} if found else {}
            page = (await http.get(path, params={"order": "asc", "limit": 3, **after})).json()
            conforms(page, ItemList)
            found += page["data"]
        await http.post("/v1/responses", json={**body, "input": found})
        return found

    items = talk(client, session, **PARSERS)
    for item in items:
        ITEM.validate_python(item)
        assert not any(part.get("logprobs") for part in item.get("content", ()))
    assert len({item["id"] for item in items}) == len(items) > 5
    shown = [item["content"][0]["text"] for item in items if item.get("role") == "user"]
    assert shown == ["Weather?", "And?", "Bye"]
    assert client.requests[2].prompt_ids == client.requests[3].prompt_ids


@pytest.mark.parametrize("more", [{}, {"instructions": "Be brief."}, {"tools": [WEATHER]}, {"input": "x " * 3000}])
def test_input_tokens_are_those_of_the_usage(more: dict[str, Any]):
    body = {**ASK, **more}
    counted = post(fake(), "/v1/responses/input_tokens", body, **PARSERS).json()
    conforms(counted, InputTokens)
    if len(body["input"]) > 2000:  # counted, although it is too long for a response
        assert counted["input_tokens"] > 2048
    else:
        used = post(fake(), "/v1/responses", body, **PARSERS).json()["usage"]
        assert counted == {"object": "response.input_tokens", "input_tokens": used["input_tokens"]}


def talk_of(turns: int) -> list[dict[str, Any]]:
    one = [{"role": "user", "content": "why " * 30}, {"role": "assistant", "content": "because " * 10}]
    return [{"role": "system", "content": "Be kind."}, *one * turns, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("turns", [1, 10, 60])
def test_truncation_drops_the_first_turns(turns: int):
    """The prompt is the longest end of the conversation that fits, after the system message."""

    def answer(input: Any, **more: Any) -> Any:
        client = fake("</think>Hello")
        body = {**ASK, "max_output_tokens": 5, "input": input, **more}
        return post(client, "/v1/responses", body, **PARSERS), [request.prompt_ids for request in client.requests]

    talked = talk_of(turns)
    found, prompts = answer(talked, truncation="auto", max_output_tokens=5)
    assert found.status_code == 200 and found.json()["truncation"] == "auto"
    for dropped in range(turns + 1):  # the oracle tries every length
        kept = talked[:1] + talked[1 + 2 * dropped :]
        whole, expected = answer(kept, max_output_tokens=5)
        if whole.status_code == 200:
            break
    assert prompts == expected and (dropped > 0) == (turns == 60)
    refused = answer("why " * 4000, truncation="auto")[0]
    assert refused.status_code == 400 and "Shorten input" in refused.json()["error"]["message"]
