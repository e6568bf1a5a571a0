"""/api/*: Ollama's format of requests, answers, streams and errors over the chat endpoint."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moe_engine.server.openapi import JSON_LINES
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, TEXT, get, post
from tests.server.test_anthropic import PARSERS, TEXTS, fake

FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
TIMES = {"created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith(JSON_LINES) and response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def joined(parts: list[Any]) -> dict[str, Any]:
    """The answer that the lines of a stream add up to."""
    *begun, last = parts
    assert last["done"] and not any(part["done"] for part in begun)
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in (part.get("message") or part).items():
            if name in ("content", "thinking", "tool_calls", "response"):
                total[name] = total[name] + value if name in total else value
    whole = {**last, **({"message": {"role": "assistant", **total}} if "message" in last else total)}
    return {name: value for name, value in whole.items() if name not in TIMES}


@pytest.mark.parametrize("parsers", [{}, PARSERS], ids=["plain", "parsed"])
@pytest.mark.parametrize("text", [*TEXTS.values(), "\n a", " "], ids=[*TEXTS, "begins with white space", "white space"])
def test_a_stream_adds_up_to_the_whole_answer(text: str, parsers: dict[str, str]) -> None:
    for path, body in (("/api/chat", {**CHAT, "tools": FUNCTIONS}), ("/api/generate", {"prompt": "hi"})):
        whole = post(fake(text), path, {**body, "stream": False}, **parsers).json()
        assert whole.keys() > TIMES and all(whole[name] >= 0 for name in TIMES - {"created_at"})
        assert joined(lines(post(fake(text), path, body, **parsers))) == {
            name: value for name, value in whole.items() if name not in TIMES
        }
        chat = post(fake(text), "/v1/chat/completions", {**CHAT, "tools": FUNCTIONS}, **parsers).json()
        assert whole["prompt_eval_count"] == chat["usage"]["prompt_tokens"] or path == "/api/generate"
        assert whole["eval_count"] == chat["usage"]["completion_tokens"] and whole["done_reason"] == "stop"
        if path == "/api/chat":
            theirs, ours = chat["choices"][0]["message"], whole["message"]
            assert ours["content"].strip() == (theirs["content"] or "").strip()
            assert ours.get("thinking") == theirs["reasoning_content"]
            calls = [call["function"] for call in theirs["tool_calls"] or ()]
            assert ours.get("tool_calls", []) == [
                {"function": {**call, "arguments": json.loads(call["arguments"])}} for call in calls
            ]


def sent(path: str, body: dict[str, Any], **settings: Any) -> tuple[str, Any]:
    """The prompt and the request that the engine gets."""
    client = fake()
    response = post(client, path, body, **settings)
    assert response.status_code == 200, response.text
    return client.tokenizer.decode(client.requests[0].prompt_ids), client.requests[0]


def test_prompts_are_those_of_the_chat_endpoint() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    theirs = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    before, after = {"role": "user", "content": "Weather?"}, {"role": "tool", "content": "sunny"}
    mine = {"messages": [before, {"role": "assistant", "content": "", "tool_calls": [call]}, after]}
    other = {"messages": [before, {"role": "assistant", "content": "", "tool_calls": [theirs]}, after]}
    tools = {"tools": FUNCTIONS}
    assert sent("/api/chat", mine | tools, **PARSERS)[0] == sent("/v1/chat/completions", other | tools, **PARSERS)[0]
    system = {"role": "system", "content": "Be brief."}
    chat = {"messages": [system, {"role": "user", "content": "hi"}]}
    prompt = {"prompt": "hi", "system": "Be brief."}
    assert sent("/api/generate", prompt)[0] == sent("/v1/chat/completions", chat)[0]
    assert sent("/api/generate", prompt | {"raw": True})[0] == sent("/v1/completions", {"prompt": "hi"})[0]


def test_options_reach_the_engine() -> None:
    options = {"num_predict": 7, "temperature": 0.25, "top_k": 3, "repeat_penalty": 1.5, "stop": "how", "num_ctx": 9}
    for path, body in (("/api/chat", CHAT), ("/api/generate", {"prompt": "hi", "raw": True})):
        _, request = sent(path, {**body, "options": options, "format": "", "keep_alive": "5m"})
        assert request.max_new_tokens == 7
        found = [request.sampling[name] for name in ("temperature", "top_k", "repetition_penalty")]
        assert found == [0.25, 3, 1.5]
        whole = post(fake(), path, {**body, "stream": False, "options": options}).json()
        assert whole.get("response", whole.get("message", {}).get("content")) == TEXT.partition("how")[0]
    _, plain = sent("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": -1}})
    assert plain.max_new_tokens > 1000  # up to the context length
    for path, body in (("/api/chat", CHAT), ("/api/generate", {"prompt": "hi", "raw": True})):
        most = [sent(path, {**body, "options": {"num_predict": n}})[1].max_new_tokens for n in (-1, 10**6)]
        assert most[0] == most[1]
    for form in ("json", {"type": "object", "properties": {}}):
        assert sent("/api/chat", {**CHAT, "format": form})[1].sampling["constraint"] is not None
    thinking = [sent("/api/chat", {**CHAT, "think": think})[0] for think in (True, False)]
    kwargs = {"thinking": True, "enable_thinking": True}
    assert thinking[0] == sent("/v1/chat/completions", {**CHAT, "chat_template_kwargs": kwargs})[0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {**CHAT, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {**CHAT, "options": {"repeat_penalty": 9}}, "options.repeat_penalty"),
        ("/api/chat", {**CHAT, "format": {"type": 5}}, "format"),
        ("/api/chat", {"messages": [{**CHAT["messages"][0], "images": ["aGk="]}]}, "messages[0].images[0]: "),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images[0]: "),
        ("/api/generate", {"prompt": "x " * 5000}, "Shorten prompt"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context: not available"),
        ("/api/generate", {"prompt": "x", "raw": True, "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x " * 5000, "options": {"num_predict": 5}}, "context length"),
        ("/api/pull", {"model": "x"}, "--model-path"),
    ],
)
def test_errors_name_the_field(path: str, body: dict[str, Any], words: str) -> None:
    response = post(fake(), path, body)
    assert response.status_code in (400, 501) and response.json().keys() == {"error"}
    assert words in response.json()["error"] and "response_format" not in response.json()["error"]


def test_a_lost_engine_ends_the_lines() -> None:
    client = fake()
    client.fail_after = 2
    last = lines(post(client, "/api/chat", CHAT))[-1]
    assert last.keys() == {"error"} and "SIGKILL" in last["error"]


def test_a_model_is_listed_shown_and_loaded() -> None:
    (listed,) = get(FakeClient(), "/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "tiny" and listed["details"]["family"] == "deepseek_v3"
    (loaded,) = get(FakeClient(weight_bytes=5), "/api/ps", server_args={"device": "cuda"}).json()["models"]
    assert loaded == listed | {
        "modified_at": loaded["modified_at"], "size": 5, "size_vram": 5, "context_length": 256,
        "expires_at": "9999-12-31T23:59:59Z",
    }  # fmt: skip
    assert get(FakeClient(weight_bytes=5), "/api/ps").json()["models"][0]["size_vram"] == 0
    shown = post(FakeClient(), "/api/show", {"model": "tiny:latest"}, **PARSERS).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["deepseek_v3.context_length"] == 256
    assert post(FakeClient(), "/api/show", {"model": "other"}).status_code == 404
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        client = FakeClient()
        answer = post(client, path, {"model": "tiny:latest", **body}).json()
        assert answer["done"] and answer["done_reason"] == "load" and answer["model"] == "tiny"
        assert not client.requests
    assert get(FakeClient(), "/api/version").json()["version"]
