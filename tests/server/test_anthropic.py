"""/v1/messages: Anthropic's format of requests, answers, streams and errors over the chat endpoint."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from moe_engine.core.messages import AddRequest
from moe_engine.server.anthropic_prompt import chat_request
from moe_engine.server.anthropic_types import CountRequest, MessagesRequest
from moe_engine.structured_output.backend import PREPARED
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from moe_engine.validation import checked
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, get, in_process, named_events, post

ASK: dict[str, Any] = {**CHAT, "max_tokens": 200}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
PARSERS = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "deepseekv31"}


def fake(text: str = "Hello world, how are you today?") -> FakeClient:
    return FakeClient(text, context_len=2048, max_req_input_len=2040, max_total_num_tokens=4096)


def call(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


TWO_CALLS = (
    f"{CALLS_BEGIN}{call('weather', json.dumps({'city': 'Paris', 'days': [1, 2]}))}{call('time', '{}')}{CALLS_END}"
)
TEXTS = {
    "text": "</think>Hello world, how are you today?",
    "thinking": "let me see</think>It is sunny.",
    "calls": f"why</think>I look it up. {TWO_CALLS}",
    "calls alone": f"why</think>{TWO_CALLS}",
    "nothing": "",
}


def answered(text: str) -> dict[str, Any]:
    response = post(fake(text), "/v1/messages", {**ASK, "tools": [WEATHER, TIME]}, **PARSERS)
    assert response.status_code == 200, response.text
    return response.json()


def content_of(events: list[Any]) -> list[dict[str, Any]]:
    """The blocks of a stream, assembled as by Anthropic's clients."""
    blocks: list[dict[str, Any]] = []
    parts: dict[int, str] = {}
    is_open: int | None = None
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) and is_open is None
            is_open = event["index"]
            blocks.append(dict(event["content_block"]))
            parts[is_open] = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == is_open
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                assert block["type"] == "tool_use"
                parts[len(blocks) - 1] += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                assert block["type"] == kind
                block[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            assert event["index"] == is_open
            is_open = None
    assert is_open is None
    for index, text in parts.items():
        if blocks[index]["type"] == "tool_use":
            blocks[index]["input"] = json.loads(text or "{}")
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def test_blocks_of_an_answer():
    answer = answered(TEXTS["calls"])
    assert (answer["type"], answer["role"], answer["stop_reason"], answer["stop_sequence"]) == (
        "message", "assistant", "tool_use", None,
    )  # fmt: skip
    assert answer["id"].startswith("msg_")
    thinking, text, weather, time = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "why", "signature": ""}
    assert text["type"] == "text" and text["text"].strip() == "I look it up."
    assert weather["input"] == {"city": "Paris", "days": [1, 2]} and weather["name"] == "weather"
    assert time["input"] == {} and time["name"] == "time"
    assert len({weather["id"], time["id"]}) == 2


def test_an_answer_of_white_space_keeps_it():
    answer = post(fake(" \r"), "/v1/messages", ASK).json()
    assert answer["content"] == [{"type": "text", "text": " \r"}]
    events = post(fake(" \r"), "/v1/messages", {**ASK, "stream": True})
    assert content_of(named_events(events)) == answer["content"]


def usage_of_chat(text: str, chat: dict[str, Any]) -> dict[str, Any]:
    return post(fake(text), "/v1/chat/completions", {**chat, "max_tokens": 200}, **PARSERS).json()["usage"]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("per_step", [1, 3])
def test_a_stream_has_the_blocks_of_the_whole_answer(text: str, per_step: int):
    whole = answered(text)
    client = fake(text)
    client.per_step = per_step
    body = {**ASK, "tools": [WEATHER, TIME], "stream": True}
    events = named_events(post(client, "/v1/messages", body, **PARSERS))
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == whole["usage"]
    details = whole["usage"]["output_tokens_details"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert details["thinking_tokens"] == usage_of_chat(text, chat)["reasoning_tokens"]
    start = events[0]["message"]["usage"]
    assert (start["output_tokens"], start["output_tokens_details"]) == (0, {"thinking_tokens": 0})
    assert without_ids(content_of(events)) == without_ids(whole["content"])


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["how"]}, "stop_sequence", "how"),
    ],
)
def test_stop_reasons(more: dict[str, Any], reason: str, sequence: str | None):
    for stream in (False, True):
        response = post(fake(), "/v1/messages", {**ASK, **more, "stream": stream})
        answer = named_events(response)[-2]["delta"] if stream else response.json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_an_upper_bound(stream: bool):
    """A client that asks for the model card's `max_tokens` gets what fits after its prompt."""
    client = fake("one two three " * 2000)
    card = get(client, "/v1/models/default", headers={"anthropic-version": "2023-06-01"}).json()
    response = post(client, "/v1/messages", {**ASK, "max_tokens": card["max_tokens"], "stream": stream})
    assert response.status_code == 200, response.text
    answer = named_events(response)[-2] if stream else response.json()
    reason = answer["delta"]["stop_reason"] if stream else answer["stop_reason"]
    used = len(client.requests[0].prompt_ids) + answer["usage"]["output_tokens"]
    assert (reason, used) == ("model_context_window_exceeded", card["max_tokens"])


def test_no_tokens_only_cache_the_prompt():
    client = fake()
    answer = post(client, "/v1/messages", {**ASK, "max_tokens": 0}).json()
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert len(client.requests) == 1


def rendered(body: dict[str, Any], path: str = "/v1/messages") -> str:
    """The prompt of a request."""
    client = fake()
    assert post(client, path, body, **PARSERS).status_code == 200
    return client.tokenizer.decode(client.requests[0].prompt_ids)


CALL = {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def test_prompts_are_those_of_the_chat_endpoint():
    """System, blocks, thoughts, calls and results: the chat template gets the messages of OpenAI's format."""
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    mine = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Paris."}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ],
        "tools": [WEATHER],
    }
    theirs = {
        "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?\nIn Paris."},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": {
            "name": "weather", "description": "of a city", "parameters": {"type": "object"},
        }}],
    }  # fmt: skip
    assert rendered(mine) == rendered(theirs, "/v1/chat/completions")
    failed = {**result, "is_error": True}
    mine["messages"] = [*mine["messages"][:2], {"role": "user", "content": [failed]}]  # type: ignore[index]
    assert "Error: sunny" in rendered(mine)


def test_sampling_parameters_reach_the_engine():
    client = fake()
    body = {**ASK, "max_tokens": 7, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "metadata": {"user_id": "u"}}
    assert post(client, "/v1/messages", body).status_code == 200
    request: AddRequest = client.requests[0]
    assert request.max_new_tokens == 7
    assert [request.sampling[name] for name in ("temperature", "top_p", "top_k")] == [0.25, 0.5, 3]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "time"}, {"type": "function", "function": {"name": "time"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any):
    """The engine gets the constraint of the chat endpoint."""
    mine, theirs = fake(), fake()
    assert post(mine, "/v1/messages", {**ASK, "tools": [WEATHER, TIME], "tool_choice": choice}, **PARSERS).is_success
    functions = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in (WEATHER, TIME)
    ]
    body = {
        **ASK, "tools": functions, "tool_choice": expected,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }  # fmt: skip
    assert post(theirs, "/v1/chat/completions", body, **PARSERS).is_success
    assert mine.requests[0].sampling == theirs.requests[0].sampling


@pytest.mark.parametrize("body", [
    ASK,
    {**ASK, "system": "Be brief.", "tools": [WEATHER]},
    {**ASK, "tools": [WEATHER], "tool_choice": {"type": "none"}},
])  # fmt: skip
def test_count_tokens_is_the_usage(body: dict[str, Any]):
    client = fake()
    usage = post(client, "/v1/messages", body, **PARSERS).json()["usage"]
    counted = post(fake(), "/v1/messages/count_tokens", body, **PARSERS).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert counted["input_tokens"] == len(client.requests[0].prompt_ids)


PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def test_images_in_the_form_of_chats():
    """A text and two images; only texts are counted."""
    link = {"type": "image", "source": {"type": "url", "url": "https://e.org/a.png"}}
    asked = blocks({"type": "text", "text": "See"}, {"type": "image", "source": PNG}, link)
    request = checked({**asked, "system": "Brief."}, MessagesRequest)
    urls = "data:image/png;base64,aGk=", "https://e.org/a.png"
    parts = [{"type": "text", "text": "See"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    _, messages, _ = chat_request(request)
    assert messages == [{"role": "system", "content": "Brief."}, {"role": "user", "content": parts}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": asked["messages"][0]["content"]}
    failed = {**result, "is_error": True}
    _, messages, _ = chat_request(checked(blocks(result, failed, {"type": "text", "text": "So?"}), MessagesRequest))
    assert messages == [
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Error: "}, *parts]},
        {"role": "user", "content": "So?"},
    ]
    response = post(fake(), "/v1/messages/count_tokens", {"messages": asked["messages"]})
    assert response.status_code == 400 and "content[0]" not in response.text and "content[1]" in response.text


def test_documents_of_plain_text():
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source, "citations": {"enabled": False}}
    shown = [{"type": "text", "text": text} for text in ("Sky\n\nIt rains.", "It rains.", "So?")]
    asked = blocks({**document, "title": "Sky", "context": None}, {**document, "title": None}, shown[2])
    assert chat_request(checked(asked, MessagesRequest))[1] == chat_request(checked(blocks(*shown), MessagesRequest))[1]
    result = blocks({"type": "tool_result", "tool_use_id": "c", "content": [document]})
    assert chat_request(checked(result, MessagesRequest))[1][0]["content"] == "It rains."
    for content in ("It rains.", [{"type": "text", "text": "It rains."}]):
        given = blocks({**document, "source": {"type": "content", "content": content}, "title": "Sky"})
        assert chat_request(checked(given, MessagesRequest))[1][0]["content"] == "Sky\n\nIt rains."


def test_results_of_searches():
    found = {"type": "search_result", "source": "http://sky", "title": "Sky", "content": [
        {"type": "text", "text": "It rains."}, {"type": "text", "text": "It snows."}]}  # fmt: skip
    text = "Sky\n\nhttp://sky\n\nIt rains.\nIt snows."
    for asked in (blocks(found), blocks({"type": "tool_result", "tool_use_id": "c", "content": [found]})):
        assert chat_request(checked(asked, MessagesRequest))[1][0]["content"] == text


@pytest.mark.parametrize(("kind", "limit"), [("enabled", 9), ("adaptive", None), ("disabled", None)])
def test_the_budget_of_thinking(kind: str, limit: int | None):
    """Enforced with a reasoning parser; without one it has no effect."""
    client = fake()
    body = {**ASK, "thinking": {"type": kind, "budget_tokens": 9}}
    for settings in (PARSERS, {}):
        assert post(client, "/v1/messages", body, **settings).status_code == 200
    assert [request.sampling["max_thinking_tokens"] for request in client.requests] == [limit, None]
    wrong = post(client, "/v1/messages", {**ASK, "thinking": {"type": "enabled", "budget_tokens": -1}}, **PARSERS)
    assert wrong.status_code == 400 and "thinking.budget_tokens: expected" in wrong.text


def test_thinking_between_tools():
    """On after the results of tools, off elsewhere."""
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "sunny"}
    talked = [*ASK["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for messages, on in ((ASK["messages"], False), (talked, True)):
        body = {**ASK, "messages": messages, "thinking": {"type": "between_tools"}}
        asked = chat_request(checked(body, MessagesRequest), limits_thinking=True)[0]
        assert asked.chat_template_kwargs == {"thinking": on, "enable_thinking": on}
        assert asked.max_thinking_tokens is None


def blocks(*parts: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
        ({**ASK, "max_tokens": -1}, "max_tokens"),
        ({**ASK, "messages": []}, "messages"),
        ({**ASK, "messages": [{"role": "wizard", "content": "hi"}]}, "role"),
        (blocks({"type": "image"}), "messages[0].content[0].source: is required"),
        (blocks({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type"),
        (blocks({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}), "source.data: expected a"),
        (blocks({"type": "image", "source": {**PNG, "media_type": "text/html"}}), "source.media_type: expected a type"),
        (blocks({"type": "text", "text": "x"}, {"type": "image", "source": PNG}), "messages[0].content[1].source: "),
        (
            blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": PNG}]}),
            "messages[0].content[0].content[0].source: ",
        ),
        (blocks({"type": "video"}), "messages[0].content[0].type"),
        (blocks({"type": "image", "source": {"type": "text", "data": "x"}}), "messages[0].content[0].source.type"),
        (blocks({"type": "document"}), "messages[0].content[0].source.type"),
        (
            blocks({"type": "document", "source": {**PNG, "media_type": "application/pdf"}}),
            "documents of type 'base64'",
        ),
        (blocks({"type": "document", "source": {"type": "text"}}), "source.data: expected a string"),
        (blocks({"type": "text"}), "messages[0].content[0].text: expected a string"),
        (blocks({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
            "content[0].source",
        ),
        ({**ASK, "tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({**ASK, "tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0].type"),
        ({**ASK, "tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({**ASK, "tools": [TIME], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({**ASK, "tools": [TIME], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({**ASK, "temperature": -1}, "temperature"),
        ({**ASK, "mcp_servers": [{"type": "url", "url": "http://tools", "name": "n"}]}, "mcp_servers"),
        ({**ASK, "container": "c"}, "container"),
        ({**ASK, "compaction": {"type": "summarize"}}, "compaction"),
        (blocks({"type": "search_result", "source": "s", "title": "t"}), "messages[0].content[0].content: expected"),
        ({**ASK, "output_config": {"effort": 5}}, "output_config.effort"),
    ],
)
def test_wrong_requests(body: dict[str, Any], words: str):
    response = post(fake(), "/v1/messages", body, **PARSERS)
    assert response.status_code == 400
    found = response.json()
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]


def test_threads_are_refused_in_the_form_that_clients_answer_with_the_whole_conversation():
    """Tool runners ask the server to hold the conversation, and continue without one after this error."""
    response = post(fake(), "/v1/messages", {**ASK, "thread": {"type": "create"}})
    error = response.json()["error"]
    assert response.status_code == 400 and "send the whole conversation in messages" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert post(fake(), "/v1/messages", {**ASK, "thread": None}).status_code == 200


def test_models_for_clients_of_anthropic():
    """The shapes of Anthropic's `ModelInfo` and its page, for requests with the header that its clients send."""
    headers = {"anthropic-version": "2023-06-01"}
    page = get(fake(), "/v1/models", headers=headers).json()
    (model,) = page.pop("data")
    assert page == {"has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert {**model, "created_at": ""} == {
        "type": "model", "id": "tiny", "display_name": "tiny", "created_at": "", "max_input_tokens": 2048,
        "max_tokens": 2048, "lifecycle": "active",
    }  # fmt: skip
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert {**get(fake(), "/v1/models/tiny", headers=headers).json(), "created_at": ""} == {**model, "created_at": ""}
    assert get(fake(), "/v1/models").json()["object"] == "list"


async def test_keys():
    bearer = {"Authorization": "Bearer k"}
    headers = [{"x-api-key": "k"}, bearer, {"x-api-key": "wrong"} | bearer]
    headers += [{}, {"x-api-key": "wrong"}, {"x-api-key": "Bearer k"}]
    async with in_process(fake(), api_key="k") as http:
        found = [await http.post("/v1/messages", json=ASK, headers=each) for each in headers]
    assert [response.status_code for response in found] == [200, 200, 200, 401, 401, 401]
    assert found[-1].json()["error"]["type"] == "authentication_error"


def test_a_stream_that_fails():
    client = fake()
    client.fail_after = 2
    found = named_events(post(client, "/v1/messages", {**ASK, "stream": True}))
    failure = found[-1]
    assert failure["type"] == "error"
    assert failure["error"]["type"] in ("api_error", "overloaded_error") and "SIGKILL" in failure["error"]["message"]


def test_text_behind_a_call_in_the_same_piece():
    """The end of the arguments belongs to the call, and no text is lost."""
    client = fake(f"why</think>{TWO_CALLS} So.")
    body = {**ASK, "tools": [WEATHER, TIME], "stream": True}
    for per_step in (2, 5, 7, 11, 13):
        client.per_step = per_step
        found = content_of(named_events(post(client, "/v1/messages", body, **PARSERS)))
        inputs = [block["input"] for block in found if block["type"] == "tool_use"]
        assert inputs == [{"city": "Paris", "days": [1, 2]}, {}]
        assert "".join(block["text"] for block in found if block["type"] == "text").strip() == "So."


def test_a_last_message_of_the_assistant_is_continued():
    turns = [*CHAT["messages"], {"role": "assistant", "content": "The capital"}]
    mine = rendered({"max_tokens": 5, "messages": turns})
    theirs = rendered({"max_tokens": 5, "messages": turns, "continue_final_message": True}, "/v1/chat/completions")
    assert mine == theirs and mine.endswith("The capital")


def test_formats_of_the_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client = fake()
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        assert post(client, "/v1/messages", {**ASK, **more}).status_code == 200
        constraint = client.requests[-1].sampling["constraint"]
        assert constraint["kind"] == PREPARED
    wrong = {**ASK, "output_config": {"format": {"type": "json_schema", "schema": {"type": "wizard"}}}}
    assert "output_config.format.schema" in post(fake(), "/v1/messages", wrong).json()["error"]["message"]


def test_the_effort_is_that_of_chats():
    for kind in (MessagesRequest, CountRequest):  # a template may show the effort
        req, _, _ = chat_request(checked({**ASK, "output_config": {"effort": "low"}}, kind))
        assert req.reasoning_effort == "low"


def test_arguments_keep_their_numbers():
    whole = CALLS_BEGIN + call("weather", '{"n": 123456789012345678901234567890}') + CALLS_END
    response = post(fake(f"why</think>{whole}"), "/v1/messages", {**ASK, "tools": [WEATHER]}, **PARSERS)
    assert '"n": 123456789012345678901234567890' in response.text
    broken = f"{CALLS_BEGIN}{call('weather', '{a}')}{CALLS_END}"
    response = post(fake(f"why</think>{broken}"), "/v1/messages", {**ASK, "tools": [WEATHER]}, **PARSERS)
    assert response.json()["content"][-1]["input"] == {"invalid_json": "{a}"}
