"""The format of event streams, with reasoning and tools, and clients that disconnect."""

from __future__ import annotations

import json

import httpx
import pytest

from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.server.fake_engine import FakeClient, clients_id
from tests.server.harness import CHAT, TEXT, events, post, real_server
from tests.waiting import until

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
CALL = f'{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{{"city": "Paris"}}{CALL_END}{CALLS_END}'


def test_native_stream():
    chunks = events(post(FakeClient(), "/generate", {"text": "x", "stream": True}))
    assert chunks[-1]["text"] == TEXT
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    batch = events(post(FakeClient(), "/generate", {"text": ["x", "y"], "stream": True}))
    assert {c["index"] for c in batch} == {0, 1}


def test_chat_stream_order():
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(post(FakeClient(), "/v1/chat/completions", body))
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert deltas[-1] == {"content": None, "reasoning_content": None}
    assert "".join(d["content"] for d in deltas[:-1]) == TEXT
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_logprobs_are_complete_in_streams():
    chunks = events(post(FakeClient("🙂é a"), "/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True}))
    tokens = [e["bytes"] for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    ids = FakeClient().tokenizer.encode("🙂é a", False)
    assert tokens[:-1] == [list(FakeClient().tokenizer.token_bytes(i)) for i in ids]


@pytest.mark.parametrize("per_step", [1, 4, 100])
@pytest.mark.parametrize("stream", [False, True])
class TestParsers:
    def ask(self, text, per_step, stream, body, **settings):
        client = FakeClient(text)
        client.per_step = per_step
        response = post(client, "/v1/chat/completions", {**CHAT, **body, "stream": stream}, **settings)
        if not stream:
            choice = response.json()["choices"][0]
            message = choice["message"]
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"] or []]
            return message["reasoning_content"] or "", message["content"] or "", calls, choice["finish_reason"]
        reasoning = content = ""
        pieces: list[list[str]] = []
        for chunk in events(response):
            delta = chunk["choices"][0]["delta"]
            reasoning += delta["reasoning_content"] or ""
            content += delta["content"] or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    pieces.append([call["function"]["name"], ""])
                pieces[call["index"]][1] += call["function"]["arguments"]
        return reasoning, content, [tuple(c) for c in pieces], chunk["choices"][0]["finish_reason"]

    def test_reasoning(self, per_step, stream):
        text = "let me think\n</think>\n\nParis"
        got = self.ask(text, per_step, stream, {}, reasoning_parser="deepseek-r1")
        assert got == ("let me think", "Paris", [], "stop")
        got = self.ask(text, per_step, stream, {"separate_reasoning": False}, reasoning_parser="deepseek-r1")
        assert got == ("", text, [], "stop")
        for hidden in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
            for more in ({}, {"separate_reasoning": False}, {"stream_reasoning": False}):
                got = self.ask(text, per_step, stream, {**hidden, **more}, reasoning_parser="deepseek-r1")
                assert got == ("", "Paris", [], "stop")
        assert self.ask("Paris", per_step, stream, {"include_reasoning": False})[:2] == ("", "Paris")
        thinking = {"chat_template_kwargs": {"thinking": True}}
        got = self.ask(text, per_step, stream, thinking, reasoning_parser="deepseek-v3")
        assert got[:2] == ("let me think", "Paris")
        assert self.ask("Paris", per_step, stream, {}, reasoning_parser="deepseek-v3")[:2] == ("", "Paris")

    def test_tools(self, per_step, stream):
        settings = {"tool_call_parser": "deepseekv31"}
        got = self.ask("I look. " + CALL, per_step, stream, {"tools": TOOLS}, **settings)
        assert got == ("", "I look. ", [("get_weather", '{"city": "Paris"}')], "tool_calls")
        assert self.ask("plain", per_step, stream, {"tools": TOOLS}, **settings) == ("", "plain", [], "stop")
        none = {"tools": TOOLS, "tool_choice": "none"}
        assert self.ask("a" + CALL, per_step, stream, none, **settings)[2:] == ([], "stop")

    def test_both(self, per_step, stream):
        got = self.ask(
            "why</think>" + CALL,
            per_step,
            stream,
            {"tools": TOOLS},
            reasoning_parser="deepseek-r1",
            tool_call_parser="deepseekv31",
        )
        assert got == ("why", "", [("get_weather", '{"city": "Paris"}')], "tool_calls")

    def test_truncated_tool_call_is_not_the_finish_reason(self, per_step, stream):
        """The call may be truncated, and a client must not run an incomplete call."""
        tokens = len(FakeClient().tokenizer.encode("I look. " + CALL, False))
        for max_tokens, reason in ((tokens, "length"), (tokens - 2, "length"), (tokens + 1, "tool_calls")):
            body = {"tools": TOOLS, "max_tokens": max_tokens}
            got = self.ask("I look. " + CALL, per_step, stream, body, tool_call_parser="deepseekv31")
            assert (got[2][0][0], got[3]) == ("get_weather", reason)

    def test_marks_that_max_tokens_cuts_are_no_text(self, per_step, stream):
        """Their tokens are counted. A stop string that is cut is text, as in SGLang and vLLM."""
        text = '<mm:think>why</mm:think>I look. <tool_call>\n{"name": "get_weather"'
        count = len(FakeClient().tokenizer.encode(text, False))
        settings = {"reasoning_parser": "minimax-m3", "tool_call_parser": "hermes"}
        for max_tokens in range(1, count):
            body = {"tools": TOOLS, "max_tokens": max_tokens}
            reasoning, content, _, finish = self.ask(text, per_step, stream, body, **settings)
            assert ("why".startswith(reasoning), "I look. ".startswith(content), finish) == (True, True, "length")
        stop = {"max_tokens": count - 2, "stop": ['"name": "get_weather"']}
        got = self.ask(text, per_step, stream, stop)
        assert got[1] == FakeClient().tokenizer.decode(FakeClient().tokenizer.encode(text, False)[:-2])


def test_reasoning_tokens_and_prompt_with_tools():
    client = FakeClient("let me think</think>Paris")
    body = {**CHAT, "tools": TOOLS}
    usage = post(client, "/v1/chat/completions", body, reasoning_parser="deepseek-r1").json()["usage"]
    want = len(client.tokenizer.encode("let me think</think>", False))
    assert usage["reasoning_tokens"] == want
    assert '"get_weather"' in client.tokenizer.decode(client.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("text", "thinking", "counted"),
    [
        ("why</think>Paris", True, "why</think>"),
        ("<think>why</think>Paris", False, "<think>why</think>"),
        ("the tag </think> ends", False, ""),
    ],
)
def test_an_end_tag_outside_the_reasoning_counts_no_reasoning(text, thinking, counted):
    client = FakeClient(text)
    body = {**CHAT, "chat_template_kwargs": {"thinking": thinking}}
    usage = post(client, "/v1/chat/completions", body, reasoning_parser="deepseek-v3").json()["usage"]
    count = len(client.tokenizer.encode(counted, False)) if counted else 0
    details = {"completion_tokens_details": {"reasoning_tokens": count}} if count else {}
    assert usage["reasoning_tokens"] == count and usage == usage | details
    answer = post(client, "/v1/chat/completions", body | {"return_meta_info": True}, reasoning_parser="deepseek-v3")
    assert answer.json()["choices"][0]["meta_info"]["reasoning_tokens"] == (count if thinking else 0)
    assert ("completion_tokens_details" in usage) == bool(count)


def test_sampling_of_chat_requests():
    client = FakeClient()
    defaults = {"temperature": 0.6, "top_p": 0.95}
    body = {**CHAT, "top_p": 0.5, "min_tokens": 2, "seed": 3, "stop": "x", "ignore_eos": True, "rid": "mine"}
    answer = post(client, "/v1/chat/completions", body, sampling_defaults=defaults).json()
    (request,) = client.requests
    sampling = request.sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["min_new_tokens"]) == (0.6, 0.5, 2)
    assert (request.seed, sampling["ignore_eos"], clients_id(request), answer["id"]) == (3, True, "mine", "mine")
    assert request.max_new_tokens == 256 - len(request.prompt_ids)  # the rest of the context


def test_continue_final_message():
    client = FakeClient()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hello wor"}]
    body = {"messages": messages, "continue_final_message": True}
    assert post(client, "/v1/chat/completions", body).status_code == 200
    assert client.tokenizer.decode(client.requests[0].prompt_ids, False).endswith("<｜Assistant｜>Hello wor")


def test_native_stream_error_event():
    client = FakeClient()
    client.fail_after = 2
    chunks = events(post(client, "/generate", {"text": "x", "stream": True}))
    assert len(chunks) == 3
    assert "SIGKILL" in chunks[-1]["error"]["message"]
    client.refuse = {"type": "abort", "message": "queue is full", "status_code": 503}
    response = post(client, "/generate", {"text": "x", "stream": True})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "queue is full"
    client.refuse = {"type": "abort", "message": "logits are not finite", "status_code": 500}
    response = post(client, "/generate", {"text": "x"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["message"]) == ("InternalServerError", "logits are not finite")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "sampling_params": {"ignore_eos": True, "max_new_tokens": 200}}),
        ("/generate", {"text": ["x", "y"], "sampling_params": {"ignore_eos": True, "max_new_tokens": 200}}),
        ("/v1/chat/completions", {**CHAT, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "x", "ignore_eos": True, "max_tokens": 200}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_at_once(path, body, stream):
    client = FakeClient()
    client.delay = 0.02
    with real_server(client) as address:
        with httpx.Client(base_url=address) as http:
            if stream:
                with http.stream("POST", path, json={**body, "stream": True}) as response:
                    chunks = response.iter_text()  # dropping the iterator would close the connection
                    next(chunks)
                    assert client.running
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(path, json=body, timeout=0.2)
        until(lambda: not client.running)
        assert len(client.closed_early) == len(client.requests)
        assert httpx.get(address + "/health").status_code == 200


def test_disconnect_before_the_first_token():
    client = FakeClient()
    client.mute = True
    with real_server(client) as address:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(address + "/generate", json={"text": "x", "stream": True}, timeout=0.2)
        until(lambda: not client.running)


def test_json_is_utf8():
    response = post(FakeClient("你好 🙂"), "/generate", {"text": "x"})
    assert "你好 🙂" in response.content.decode()
    assert json.loads(response.content)["text"] == "你好 🙂"


def test_a_time_limit_ends_a_stream_with_an_error_event_and_a_batch_with_503():
    client = FakeClient()
    words = "the request ran for longer than --request-running-timeout (3 s); ask for fewer tokens"
    client.refuse, client.refuse_after = {"type": "abort", "message": words, "status_code": 503}, 2
    chunks = events(post(client, "/generate", {"text": "x", "stream": True}))
    assert [len(chunk["output_ids"]) for chunk in chunks[:-1]] == [1, 2] and words in chunks[-1]["error"]["message"]
    for path, body in (
        ("/generate", {"text": ["x", "y"], "sampling_params": {"n": 2}}),
        ("/v1/chat/completions", {**CHAT, "n": 2}),
    ):
        response = post(client, path, body)
        assert response.status_code == 503 and words in response.json()["error"]["message"]
        assert "retry-after" in response.headers and not client.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "shown", "matched"), [
    ({}, "Hello wor", "w.r"), ({"stop": "rld"}, "Hello wor", "w.r"), ({"stop": "lo w"}, "Hel", "lo w"),
])  # fmt: skip
def test_stop_patterns(stream, more, shown, matched):
    """The match stays in the text; a stop string that ends first wins."""
    body = {"text": "x", "sampling_params": {"stop_regex": ["w.r", r"\d+"], **more}, "stream": stream}
    response = post(FakeClient(), "/generate", body)
    answer = events(response)[-1] if stream else response.json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (shown, {"type": "stop", "matched": matched})
    chat = post(FakeClient(), "/v1/completions", {"prompt": "x", "stop_regex": "w.r", **more})
    (choice,) = chat.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == (shown, "stop", matched)


def test_a_thinking_budget_reaches_the_engine_with_the_tags():
    client = FakeClient()
    settings = {"reasoning_parser": "deepseek-v3"}
    body = {**CHAT, "max_thinking_tokens": 5}
    tags = client.tokenizer.token_id("<think>"), client.tokenizer.token_id("</think>")
    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert post(client, "/v1/chat/completions", {**body, **thinking}, **settings).status_code == 200
    vllm = {**CHAT, "thinking_token_budget": 5, **thinking}
    assert post(client, "/v1/chat/completions", vllm, **settings).status_code == 200
    native = {"text": "x", "require_reasoning": True, "sampling_params": {"max_thinking_tokens": 5}}
    assert post(client, "/generate", native, **settings).status_code == 200
    above = {**native, "max_thinking_tokens": 5, "sampling_params": {"max_thinking_tokens": 7}}
    assert post(client, "/generate", above, **settings).status_code == 200
    for request in client.requests:
        found = request.sampling["max_thinking_tokens"], tuple(request.sampling["thinking_tags"])
        assert found == (5, (-1, tags[1]))
    for path, wrong, words in (
        ("/generate", {**native, "require_reasoning": False}, "require_reasoning"),
        ("/v1/completions", {"prompt": "x", "max_thinking_tokens": 5}, "needs a chat"),
    ):
        response = post(client, path, wrong, **settings)
        assert response.status_code == 400 and "max_thinking_tokens: needs" in response.text and words in response.text
    response = post(client, "/v1/chat/completions", body)
    assert response.status_code == 400 and "--reasoning-parser" in response.text
