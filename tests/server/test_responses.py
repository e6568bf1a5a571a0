"""/v1/responses: OpenAI's items over the chat endpoint, its events, and stored responses. The oracles are the models of
OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moe_engine.errors import InputError
from moe_engine.server.bodies import PROCESS_BYTES
from moe_engine.server.responses.store import ResponseStore
from moe_engine.server.responses.types import DeletedResponse, ResponseObject
from moe_engine.tokenizer.tool_calls.named import CALLS_BEGIN, CALLS_END
from tests.server.fake_engine import FakeClient
from tests.server.harness import named_events, post, talk
from tests.server.test_anthropic import PARSERS, TEXTS, call, fake
from tests.server.test_schema import conforms

ASK: dict[str, Any] = {"input": "hi", "max_output_tokens": 200}
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object"}}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object"}}
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def answered(text: str, **more: Any) -> dict[str, Any]:
    response = post(fake(text), "/v1/responses", {**ASK, "tools": [WEATHER, TIME], **more}, **PARSERS)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def test_items_of_an_answer():
    answer = answered(TEXTS["calls"])
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    reasoning, message, weather, time = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert message["content"][0]["text"].strip() == "I look it up." and message["role"] == "assistant"
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": "Paris", "days": [1, 2]})
    assert time["name"] == "time" and weather["call_id"] != time["call_id"]
    assert len({item["id"] for item in answer["output"]}) == 4
    assert Response.model_validate(answered("</think>Hello")).output_text == "Hello"


def without_names(value: Any) -> Any:
    """The object without the ids and times that differ between two requests."""
    if isinstance(value, dict):
        return {k: without_names(v) for k, v in value.items() if k not in ("id", "call_id", "created_at")}
    return [without_names(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("per_step", [1, 3])
def test_a_stream_adds_up_to_the_whole_answer(text: str, per_step: int):
    whole = answered(text)
    client = fake(text)
    client.per_step = per_step
    body = {**ASK, "tools": [WEATHER, TIME], "stream": True}
    events = named_events(post(client, "/v1/responses", body, **PARSERS))
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_names(events[-1]["response"]) == without_names(whole)
    sums: dict[str, str] = {}
    done: dict[str, str] = {}
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            sums[event["item_id"]] = sums.get(event["item_id"], "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            done[event["item_id"]] = event["text"]
        elif kind == "function_call_arguments.done":
            done[event["item_id"]] = event["arguments"]
        elif kind == "output_item.done":
            assert event["output_index"] == len(items)
            items.append(event["item"])
    assert sums == {name: text for name, text in done.items() if text}
    assert items == events[-1]["response"]["output"]


def test_the_end_of_an_answer():
    answer = post(fake(), "/v1/responses", {**ASK, "max_output_tokens": 2}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 2
    events = named_events(post(fake(), "/v1/responses", {**ASK, "max_output_tokens": 2, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and done[-1]["status"] == "incomplete"
    client = fake()
    client.fail_after = 2
    events = named_events(post(client, "/v1/responses", {**ASK, "stream": True}))
    assert events[-1]["type"] == "response.failed" and "SIGKILL" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["output"][-1]["status"] == "incomplete"
    EVENT.validate_python(events[-1])


def test_the_response_repeats_the_request():
    fields = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "tool_choice": "none",
        "parallel_tool_calls": False, "reasoning": {"effort": "low"}, "store": False, "user": "u",
    }  # fmt: skip
    answer = answered("</think>Hello", **fields)
    assert answer["reasoning"]["effort"] == "low" and answer["tools"][0]["name"] == "weather"
    assert {name: answer[name] for name in fields if name != "reasoning"} == {
        name: value for name, value in fields.items() if name != "reasoning"
    }


def prompt_of(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The prompt and the sampling parameters received by the engine."""
    client = fake()
    response = post(client, path, body, **PARSERS)
    assert response.status_code == 200, response.text
    return client.tokenizer.decode(client.requests[0].prompt_ids), client.requests[0].sampling


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def test_prompts_are_those_of_the_chat_endpoint():
    """Instructions, messages of either form, thoughts, calls and results."""
    mine = {
        "instructions": "Be brief.", "max_output_tokens": 9, "tools": [WEATHER],
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        ],
    }  # fmt: skip
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i, arguments in ((1, '{"city": "Paris"}'), (2, "{}"))
    ]
    theirs = {
        "max_tokens": 9, "tools": [chat_tool(WEATHER)],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
            {"role": "user", "content": "And now?"},
        ],
    }  # fmt: skip
    assert prompt_of("/v1/responses", mine)[0] == prompt_of("/v1/chat/completions", theirs)[0]


def test_parts_of_chats_with_other_names_of_text():
    """Those of the Responses API, and a refusal of an earlier answer."""

    def prompt(*kinds: str) -> str:
        parts = [{"type": kind, ("refusal" if kind == "refusal" else "text"): "so"} for kind in kinds]
        roles = zip(("user", "assistant", "user"), parts)
        body = {"messages": [{"role": role, "content": [part]} for role, part in roles]}
        return prompt_of("/v1/chat/completions", body)[0]

    assert prompt("input_text", "refusal", "text") == prompt("text", "output_text", "text")
    response = post(fake(), "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "refusal"}]}]})
    assert response.status_code == 400 and response.json()["param"] == "messages[0].content[0].refusal"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_functions_without_parameters_have_an_empty_list(path: str):
    asked = {"input": "x"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "x"}]}

    def prompt(**parameters: Any) -> str:
        tool = {"type": "function", "name": "now", **parameters}
        return prompt_of(path, {**asked, "tools": [tool if "input" in asked else chat_tool(tool)]})[0]

    assert prompt() == prompt(parameters=None) == prompt(parameters={"type": "object", "properties": {}})
    assert "now" in prompt()


FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"temperature": 0.5, "top_p": 0.25, "top_k": 3}, {"temperature": 0.5, "top_p": 0.25, "top_k": 3}),
        ({"text": {"format": FORMAT}}, {"response_format": {"type": "json_schema", "json_schema": {
            name: FORMAT[name] for name in ("name", "schema", "strict")
        }}}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"tools": [WEATHER, TIME], "tool_choice": "required"},
         {"tools": [chat_tool(WEATHER), chat_tool(TIME)], "tool_choice": "required"}),
        ({"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "name": "time"}},
         {"tools": [chat_tool(WEATHER), chat_tool(TIME)],
          "tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ({"tools": [WEATHER, TIME], "tool_choice": {
            "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}},
         {"tools": [chat_tool(WEATHER), chat_tool(TIME)], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}}}),
    ],
)  # fmt: skip
def test_sampling_is_that_of_the_chat_endpoint(mine: dict[str, Any], theirs: dict[str, Any]):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, **theirs}
    found, expected = prompt_of("/v1/responses", {**ASK, **mine}), prompt_of("/v1/chat/completions", chat)
    assert found[0] == expected[0]
    assert {**found[1], "constraint": None} == {**expected[1], "constraint": None}
    constraints = [sampling["constraint"] for _, sampling in (found, expected)]
    assert [each and {**each, "where": ""} for each in constraints[:1]] == [
        each and {**each, "where": ""} for each in constraints[1:]
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "content[0].file_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [SEEN]}]},
            "input[0].output[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [SEEN]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "assistant", "content": [SEEN]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({**ASK, "tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({**ASK, "tools": [{"type": "web_search"}], "tool_choice": "required"}, "needs tools"),
        ({**ASK, "tools": [{"type": "custom"}]}, "tools[0].name"),
        ({**ASK, "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({**ASK, "tools": [{"type": "function"}]}, "tools[0].name"),
        ({**ASK, "tools": [TIME], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({**ASK, "tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        (
            {
                **ASK,
                "tools": [TIME],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({**ASK, "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({**ASK, "n": 2}, "n:"),
        (
            {**ASK, "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "wizard"}}}},
            "text.format.schema",
        ),
        ({**ASK, "truncation": "middle"}, "truncation"),
        ({**ASK, "background": True, "store": False}, "background"),
        ({**ASK, "background": True, "stream": True}, "stream"),
        ({**ASK, "context_management": [{"type": "compaction"}]}, "context_management"),
        ({**ASK, "metadata": {"a": 1}}, "metadata"),
        ({**ASK, "top_logprobs": 21}, "top_logprobs"),
        ({**ASK, "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_wrong_requests(body: dict[str, Any], words: str):
    response = post(fake(), "/v1/responses", body, **PARSERS)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_stored_responses_continue():
    client = fake("</think>Hello")

    async def session(http: httpx.AsyncClient) -> None:
        first = (await http.post("/v1/responses", json={**ASK, "instructions": "Be brief."})).json()
        got = await http.get(f"/v1/responses/{first['id']}")
        conforms(got.json(), ResponseObject)
        assert got.json() == first
        body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 50, "stream": True}
        second = named_events(await http.post("/v1/responses", json=body))[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        third = {"input": "again", "previous_response_id": second["id"], "max_output_tokens": 50, "store": False}
        unstored = (await http.post("/v1/responses", json=third)).json()
        assert (await http.get(f"/v1/responses/{unstored['id']}")).status_code == 404
        deleted = await http.delete(f"/v1/responses/{first['id']}")
        conforms(deleted.json(), DeletedResponse)
        for method in ("GET", "DELETE"):
            gone = await http.request(method, f"/v1/responses/{first['id']}")
            assert gone.status_code == 404 and first["id"] in gone.json()["error"]["message"]
        lost = await http.post("/v1/responses", json={**ASK, "previous_response_id": first["id"]})
        assert lost.status_code == 404 and lost.json()["error"]["param"] == "previous_response_id"

    talk(client, session, **PARSERS)
    turn = [{"role": "assistant", "content": "Hello"}]
    talked = [{"role": "user", "content": "hi"}, *turn, {"role": "user", "content": "more"}, *turn,
              {"role": "user", "content": "again"}]  # fmt: skip
    prompt = client.tokenizer.decode(client.requests[2].prompt_ids)
    assert prompt == prompt_of("/v1/chat/completions", {"messages": talked, "max_tokens": 50})[0]


def test_large_bodies_cannot_continue_a_stored_response():
    body = {**ASK, "previous_response_id": "resp_x", "unknown": "x" * PROCESS_BYTES}
    response = post(FakeClient(), "/v1/responses", body)
    assert response.status_code == 400 and "whole conversation" in response.json()["error"]["message"]


def test_the_store_is_bounded():
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for i in range(5):
        store.put({"id": f"r{i}"}, [{"role": "user", "content": str(i)}])
    assert len(store) == 3
    assert store.items("r2") == [{"role": "user", "content": "2"}]  # now the most recent
    store.put({"id": "r5"}, [])
    with pytest.raises(InputError, match="'r3'"):
        store.response("r3")
    assert json.loads(store.response("r2")) == {"id": "r2"}
    store.put({"id": "r2", "again": 1}, [])
    assert len(store) == 3
    store.put({"id": "large", "text": "x" * 970}, [])
    assert len(store) == 1 and store.num_bytes <= 1000
    store.put({"id": "too large", "text": "x" * 2000}, [])
    assert len(store) == 0 and store.num_bytes == 0


PATCH = {"type": "custom", "name": "patch", "description": "changes files",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}  # fmt: skip
AGENTS = {"type": "namespace", "name": "agents", "description": "of this one", "tools": [TIME, PATCH]}
OFFERED = [WEATHER, AGENTS, PATCH, {"type": "web_search", "external_web_access": False}]
"""Tools as a coding agent offers them."""
PATCHED = {"input": '*** a\n"b" \\ é'}


@pytest.mark.parametrize("per_step", [1, 7])
def test_calls_of_custom_tools_and_of_namespaces(per_step: int):
    calls = [("patch", json.dumps(PATCHED)), ("agents__time", '{"zone": "x"}'), ("agents__patch", json.dumps(PATCHED)),
             ("weather", "{}")]  # fmt: skip
    text = f"why</think>{CALLS_BEGIN}{''.join(call(*each) for each in calls)}{CALLS_END}"
    answer = answered(text, tools=OFFERED)
    patch, time, inner, weather = items = answer["output"][1:]
    assert [item["type"] for item in items] == [
        "custom_tool_call",
        "function_call",
        "custom_tool_call",
        "function_call",
    ]
    assert patch["name"] == inner["name"] == "patch" and patch["input"] == inner["input"] == PATCHED["input"]
    assert (time["name"], time["namespace"], time["arguments"]) == ("time", "agents", '{"zone": "x"}')
    assert inner["namespace"] == "agents" and "namespace" not in patch and "namespace" not in weather
    client = fake(text)
    client.per_step = per_step
    body = {**ASK, "tools": OFFERED, "stream": True}
    events = named_events(post(client, "/v1/responses", body, **PARSERS))
    for event in events:
        EVENT.validate_python(event)
    assert without_names(events[-1]["response"]) == without_names(answer)
    given = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [event.get("delta", event.get("input")) for event in given] == [PATCHED["input"]] * 4
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and given[1]["item_id"] == done[1]["id"]


def test_the_input_of_a_call_that_is_cut_is_its_text():
    text = f"</think>{CALLS_BEGIN}{call('patch', json.dumps(PATCHED)[:-6])}{CALLS_END}"
    (patch,) = answered(text, tools=OFFERED)["output"]
    assert patch["input"] == json.dumps(PATCHED)[:-6]


def test_conversations_with_custom_tools_and_namespaces():
    """The prompt is that of functions, and a stored call is continued."""
    turns = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", **PATCHED},
        {"type": "function_call", "call_id": "c2", "name": "time", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
    ]
    only_input = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                  "additionalProperties": False}  # fmt: skip
    words = 'changes files\n\nThe input is a text of this lark grammar:\nstart: "x"'

    def patch(name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "description": words, "parameters": only_input}

    functions = [WEATHER, {**TIME, "name": "agents__time"}, patch("agents__patch"), patch("patch")]
    flat = [
        turns[0],
        {"type": "function_call", "call_id": "c1", "name": "patch",
         "arguments": json.dumps(PATCHED, ensure_ascii=False)},
        {"type": "function_call", "call_id": "c2", "name": "agents__time", "arguments": "{}"},
        {**turns[3], "type": "function_call_output"}, turns[4],
    ]  # fmt: skip
    chosen = {"type": "custom", "name": "patch"}, {"type": "function", "name": "patch"}
    mine, theirs = (
        prompt_of("/v1/responses", {**ASK, "input": given, "tools": tools, "tool_choice": choice})
        for given, tools, choice in ((turns, OFFERED, chosen[0]), (flat, functions, chosen[1]))
    )
    assert mine == theirs
    client = fake(f"</think>{CALLS_BEGIN}{call('patch', json.dumps(PATCHED))}{CALLS_END}")

    async def session(http: httpx.AsyncClient) -> None:
        first = (await http.post("/v1/responses", json={**ASK, "tools": OFFERED})).json()
        result = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "ok"}
        body = {**ASK, "input": [result], "previous_response_id": first["id"], "tools": OFFERED}
        second = (await http.post("/v1/responses", json=body)).json()
        items = (await http.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()["data"]
        assert [item["type"] for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]

    talk(client, session, **PARSERS)
