"""Every error of a client is answered with 400 and the field's name, and never reaches the engine."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

from moe_engine.server import errors, unknown_fields
from tests.server.fake_engine import FakeClient
from tests.server.harness import CHAT, get, in_process, post, real_server, talk

NAN = float("nan")
TOOLS = [{"type": "function", "function": {"name": "a"}}]
NATIVE = [
    ({}, "text: give exactly one of text and input_ids; neither is set"),
    ({"text": "a", "input_ids": [1]}, "text: give exactly one"),
    ({"text": ""}, "text: expected a string of length >= 1, got ''"),
    ({"text": []}, "text: expected a list of length >= 1, got []"),
    ({"text": ["a", ""]}, "text[1]: expected a string of length >= 1, got ''"),
    ({"text": 5}, "text: expected a string"),
    ({"text": ["a", 5]}, "text[1]: expected a string, got 5"),
    ({"text": "\ud83d"}, "text: character 0 is half of a surrogate pair"),
    ({"text": "a", "extra_key": "\ud83d"}, "extra_key: character 0 is half"),
    ({"text": "a", "sampling_params": {"stop": ["a", "b\udc00"]}}, "sampling_params.stop[1]: character 1 is half"),
    ({"text": "a", "sampling_params": {"\ud83d": 1}}, r"sampling_params.\ud83d: character 0 is half"),
    ({"input_ids": []}, "input_ids: expected a list of length >= 1, got []"),
    ({"input_ids": [[1], []]}, "input_ids[1]: expected a list of length >= 1, got []"),
    ({"input_ids": "1"}, "input_ids: expected a list, got '1'"),
    ({"input_ids": [1, "2"]}, "input_ids[1]: expected an integer or a list, got '2'"),
    ({"input_ids": [1, 2.5]}, "input_ids[1]: expected an integer or a list, got 2.5"),
    ({"input_ids": [True]}, "input_ids[0]: expected an integer or a list, got True"),
    ({"input_ids": [[1], 2]}, "input_ids[1]: expected a list"),
    ({"input_ids": [-1]}, "input_ids[0]: expected an integer >= 0, got -1"),
    ({"input_ids": [[5], [10**6]]}, "input_ids[1][0]: token id 1000000 is outside"),
    ({"input_ids": [10**30]}, "is outside the vocabulary"),
    ({"input_ids": [5] * 256}, "The input (256 tokens) is longer than the model's context length (256 tokens)."),
    ({"input_ids": [5] * 252}, "Input length (252 tokens) exceeds the maximum allowed length (250 tokens)."),
    ({"text": "a b" * 100_000}, "is longer than the model's context length (256 tokens)."),
    ({"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 100}}, "You requested a total of 300 tokens: 200"),
    ({"text": "a", "sampling_params": 5}, "sampling_params: expected an object"),
    (
        {"text": "a", "sampling_params": {"temperature": NAN}},
        "sampling_params.temperature: expected a number >= 0.0, got nan",
    ),
    (
        {"text": "a", "sampling_params": {"temperature": -1}},
        "sampling_params.temperature: expected a number >= 0.0, got -1",
    ),
    ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p: expected a number"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (
        {"text": "a", "sampling_params": {"top": 1}},
        "sampling_params.top: unknown field (did you mean stop?); known ones are temperature, top_p,",
    ),
    (
        {"text": "a", "sampling_params": {"max_tokens": 1}},
        "sampling_params.max_tokens: unknown field (did you mean max_new_tokens?); known ones are",
    ),
    ({"text": "a", "sampling_params": {"stop_regex": "a$"}}, "sampling_params.stop_regex: 'a$' has an anchor"),
    ({"text": "a", "sampling_params": {"stop_regex": ["b", "(a"]}}, "sampling_params.stop_regex: '(a' is not a"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [99999]}}, "sampling_params.stop_token_ids: token id 99999"),
    ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "sampling_params.logit_bias: token id 99999"),
    ({"text": "a", "sampling_params": {"allowed_token_ids": [99999]}}, "sampling_params.allowed_token_ids: token id"),
    ({"text": "a", "sampling_params": {"allowed_token_ids": []}}, "sampling_params.allowed_token_ids"),
    ({"text": "a", "sampling_params": {"bad_words": [" "]}}, "sampling_params.bad_words: ' ' has no tokens"),
    ({"text": "a", "custom_logit_processor": "{}"}, "--enable-custom-logit-processor"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params: 1 values for 2 prompts"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params[1].n"),
    ({"text": ["a"] * 1000, "sampling_params": {"n": 100}}, "text: 100000 sequences (prompts times n)"),
    ({"text": "a", "rid": 5}, "rid: expected a string"),
    ({"text": "a", "rid": ""}, "rid: expected a string of length >= 1"),
    ({"text": "a", "rid": "x" * 300}, "rid: expected a string of length <= 256"),
    ({"text": "a", "rid": "a\nb"}, "rid: "),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid: duplicate id"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid: 1 ids for 2 prompts"),
    ({"text": "a", "stream": "yes"}, "stream: expected true or false"),
    ({"text": "a", "return_logprob": 1}, "return_logprob: expected true or false"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len: 99 is beyond the prompt"),
    (
        {"text": "a", "return_logprob": True, "top_logprobs_num": -1},
        "top_logprobs_num: expected an integer >= 0, got -1",
    ),
    (
        {"text": "a", "return_logprob": True, "token_ids_logprob": ["x"]},
        "token_ids_logprob[0]: expected an integer or a list, got 'x'",
    ),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params: a list is for a batch of prompts"),
    ({"text": "a", "return_logprob": [True]}, "return_logprob: a list is for a batch of prompts"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [[5]]}, "token_ids_logprob: a list is for a batch"),
    (
        {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[5], 5]},
        "token_ids_logprob[1]: expected a list",
    ),
    ({"text": "a", "priority": "high"}, "priority: expected an integer"),
    ({"text": "a", "return_sampling_mask": True}, "return_sampling_mask: not available"),
    ({"text": "a", "extra_key": 5}, "extra_key: expected a string"),
    ({"text": "a", "image_data": "x"}, "takes text alone"),
    ({"text": "a", "lora_path": "x"}, "lora_path: 'x': names a LoRA adapter, and this server runs without"),
    ({"text": "a", "data_parallel_rank": 3}, "routed_dp_rank 3: this server has one data-parallel rank, 0"),
    ({"text": "a", "routed_dp_rank": "x"}, "routed_dp_rank: expected"),
]


@pytest.mark.parametrize(("body", "message"), NATIVE)
@pytest.mark.parametrize("stream", [False, True])
def test_generate(body, message, stream):
    client = FakeClient()
    response = post(client, "/generate", {"stream": stream, **body})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert client.requests == []


def named(function):
    return {"type": "function", "function": {"name": function}}


def chat(**fields):
    return {**CHAT, **fields}


OPENAI = [
    ("chat/completions", {}, "messages", "messages: is required"),
    ("chat/completions", {"messages": []}, "messages", "messages: expected a list of length >= 1, got []"),
    ("chat/completions", {"messages": "hi"}, "messages", "messages: expected a list, got 'hi'"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]", "messages[0]: expected an object"),
    ("chat/completions", {"messages": [{"role": "x"}]}, "messages[0].role", "messages[0].role: expected 'system' or"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected a string"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url.url",
        "image_url.url: is required",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
        "messages[0].content[0].image_url.url",
        "takes text alone",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        "messages[0].content[0].type",
        "videos are not supported",
    ),
    ("chat/completions", chat(temperature="hot"), "temperature", "temperature: expected a number"),
    ("chat/completions", chat(temperature=NAN), "temperature", "temperature: expected a number >= 0.0, got nan"),
    ("chat/completions", chat(max_tokens="5"), "max_tokens", "max_tokens: expected an integer"),
    (
        "chat/completions",
        chat(max_completion_tokens=-5),
        "max_completion_tokens",
        "max_completion_tokens: expected an integer >= 0, got -5",
    ),
    ("chat/completions", chat(reasoning_effort=3), "reasoning_effort", "reasoning_effort: expected a string, got 3"),
    ("chat/completions", chat(reasoning_effort=["low"]), "reasoning_effort", "expected a string, got ['low']"),
    ("chat/completions", chat(reasoning_effort="50 %"), "reasoning_effort", "expected a word such as none, low"),
    ("chat/completions", chat(reasoning={"effort": 3}), "reasoning.effort", "expected a string, got 3"),
    ("chat/completions", chat(reasoning={"enable": True}), "reasoning.enable", "did you mean enabled?"),
    ("chat/completions", chat(reasoning={"enabled": "yes"}), "reasoning.enabled", "expected true or false, got 'yes'"),
    ("responses", {"input": "a", "reasoning": {"effort": 3}}, "reasoning.effort", "expected a string, got 3"),
    ("responses", {"input": "a", "reasoning": {"effort": ""}}, "reasoning.effort", "expected a word such as none, low"),
    ("chat/completions", chat(max_completion_tokens=300), "max_completion_tokens", "maximum context length"),
    ("chat/completions", chat(max_completion_tokens=2, min_tokens=3), "min_tokens", "above max_completion_tokens (2)"),
    ("chat/completions", chat(max_tokens=2, min_tokens=3), "min_tokens", "min_tokens: 3 is above max_tokens (2)"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a b" * 900}]}, "messages", "Shorten messages, or"),
    ("chat/completions", chat(chat_template_kwargs={"x": "\ud83d"}), "chat_template_kwargs.x", "half of a surrogate"),
    (
        "chat/completions",
        chat(tool_choice="banana"),
        "tool_choice",
        "expected 'auto' or 'none' or 'required', got 'banana'",
    ),
    ("chat/completions", chat(max_tokens=10_000), "max_tokens", "maximum context length of 256 tokens"),
    ("chat/completions", chat(seed="x"), "seed", "seed: expected an integer"),
    ("chat/completions", chat(n=0), "n", "n: expected an integer >= 1, got 0"),
    ("chat/completions", chat(stop=[""]), "stop[0]", "stop[0]: expected a string of length >= 1"),
    ("chat/completions", chat(stream="yes"), "stream", "stream: expected true or false, got 'yes'"),
    ("chat/completions", chat(logprobs=5), "logprobs", "logprobs: expected true or false, got 5"),
    ("chat/completions", chat(top_logprobs=5), "top_logprobs", "top_logprobs: needs logprobs: true"),
    ("chat/completions", chat(functions=[{"name": "f"}]), "functions", "functions: not available"),
    ("chat/completions", chat(use_beam_search=True), "use_beam_search", "use_beam_search: not available"),
    ("completions", {"prompt": "x", "prompt_embeds": "AA=="}, "prompt_embeds", "prompt_embeds: not available"),
    ("chat/completions", chat(echo=True), "echo", "echo: not available"),
    ("chat/completions", chat(logprob_token_ids=[5]), "logprob_token_ids", "logprob_token_ids: not available"),
    ("chat/completions", chat(mm_processor_kwargs={"a": 1}), "mm_processor_kwargs", "mm_processor_kwargs: not"),
    ("chat/completions", chat(prompt_logprobs=0), "prompt_logprobs", "prompt_logprobs: not available"),
    ("chat/completions", chat(truncate_prompt_tokens=9), "truncate_prompt_tokens", "with --allow-auto-truncate"),
    ("chat/completions", chat(chat_template="{{ 1 }}"), "chat_template", "start the server with --chat-template FILE"),
    ("chat/completions", chat(documents=[{"text": "a"}]), "documents", "send them in chat_template_kwargs"),
    ("completions", {"prompt": "a", "kv_transfer_params": {"x": 1}}, "kv_transfer_params", "not available"),
    ("completions", {"prompt": "a", "logits_processors": ["a.b"]}, "logits_processors", "not available"),
    ("chat/completions", chat(modalities=["text", "audio"]), "modalities[1]", "modalities[1]: expected 'text'"),
    ("chat/completions", chat(web_search_options={}), "web_search_options", "web_search_options: not available"),
    (
        "chat/completions",
        chat(logprobs=True, top_logprobs=1000),
        "top_logprobs",
        "top_logprobs: 1000 log-probabilities",
    ),
    ("chat/completions", chat(tool_choice="required"), "tool_choice", "tool_choice: needs tools"),
    ("chat/completions", chat(tool_choice="required", tools=TOOLS), "tool_choice", "needs a server with --tool-call"),
    ("chat/completions", chat(tool_choice={"type": "x"}), "tool_choice.type", "or 'allowed_tools', got 'x'"),
    ("chat/completions", chat(tool_choice={"type": "function"}), "tool_choice.function.name", "expected a string"),
    ("chat/completions", chat(tool_choice=named("b"), tools=TOOLS), "tool_choice.function.name", "'b' is not the name"),
    ("chat/completions", chat(tools=[{"type": "x"}]), "tools[0].type", "expected 'function', got 'x'"),
    ("chat/completions", chat(tools=[{"function": {}}]), "tools[0].function.name", "is required"),
    ("chat/completions", chat(response_format={"type": "yaml"}), "response_format", "is unknown"),
    ("chat/completions", chat(chat_template_kwargs={"messages": 1}), "chat_template_kwargs.messages", "leave it out"),
    ("chat/completions", chat(continue_final_message=True), "continue_final_message", "must be the assistant's"),
    ("chat/completions", chat(stream_options=5), "stream_options", "expected an object, got 5"),
    ("completions", {}, "prompt", "prompt: is required"),
    ("completions", {"prompt": None}, "prompt", "prompt: expected a string"),
    ("completions", {"prompt": ""}, "prompt", "prompt: expected a string of length >= 1"),
    ("completions", {"prompt": []}, "prompt", "prompt: expected a list of length >= 1"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", "prompt[1]: expected a string"),
    ("completions", {"prompt": [1, "a"]}, "prompt", "prompt[1]: expected a token id"),
    ("completions", {"prompt": [1, 10**6]}, "prompt", "prompt[1]: token id 1000000 is outside"),
    ("completions", {"prompt": "a", "logprobs": 1000}, "logprobs", "logprobs: 1000 log-probabilities"),
    ("completions", {"prompt": "a", "json_schema": "{"}, "json_schema", "not valid JSON"),
    ("completions", {"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids", "stop_token_ids: token id 99999"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "has no tokens for the middle of a text"),
    ("completions", {"prompt": [5], "suffix": "b"}, "suffix", "suffix: needs a prompt of text"),
    ("completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix", "cannot be combined with echo"),
    ("completions", {"prompt": [[5], [5] * 256]}, "prompt[1]", "The input (256 tokens) is longer than"),
    ("completions", {"prompt": "a", "n": 3, "best_of": 2}, "best_of", "best_of: 2 sequences are fewer than n (3)"),
    ("completions", {"prompt": "a", "best_of": 3, "stream": True}, "best_of", "above n not in a stream"),
    ("completions", {"prompt": "a", "best_of": "x"}, "best_of", "best_of: expected an integer, got 'x'"),
    ("completions", {"prompt": "a", "lora_path": "x"}, "lora_path", "runs without --enable-lora"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "expected an integer as each key"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), OPENAI)
def test_openai(path, body, param, message):
    client = FakeClient()
    response = post(client, f"/v1/{path}", body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["object"] == "error"
    assert message in error["message"]
    assert error["param"] == param
    assert error["error"] == {k: error[k] for k in ("message", "type", "param", "code")}
    assert client.requests == []


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text": ', "not valid JSON"),
        (b"", "the request body is empty"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"text": "\xe9"}', "not UTF-8 at byte 10; send JSON in UTF-8, uncompressed"),
        (gzip.compress(b'{"text": "a"}'), "not UTF-8 at byte 1; send JSON in UTF-8, uncompressed"),
        (b'{"text": %s}' % (b"9" * 5000), "a number of more than 4300 digits"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"text": "\\ud83d", "prompt": "\\ud83d"}', "is half of a surrogate pair"),
    ],
)
def test_bodies_that_are_not_objects(path, body, message):
    response = post(FakeClient(), path, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_large_body_is_refused_unread():
    response = post(FakeClient(), "/generate", b"x" * 2000, max_body_bytes=1000)
    assert response.status_code == 413
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1
            yield b"x" * 600

    async def session(http):
        return await http.post("/v1/completions", content=endless())

    response = talk(FakeClient(), session, max_body_bytes=1000)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["message"]
    assert read <= 3
    assert response.headers["connection"] == "close"  # the rest of the body would follow on it


@pytest.mark.parametrize("form", ["Content-Length: 5000", "Transfer-Encoding: chunked"])
def test_oversized_body_closes_the_connection(form, monkeypatch):
    """The rest of the body must not be read as the next request."""
    monkeypatch.setattr(errors, "DISCARD_SECONDS", 0.1)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\n{form}\r\n\r\n".encode()
    body = b" " * 4000 if "Length" in form else b"fa0\r\n" + b" " * 4000 + b"\r\n"
    with real_server(FakeClient(), max_body_bytes=1000) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + body)
            received = b""
            while data := connection.recv(65536):  # ends by the server's hand, or this test by its timeout
                received += data
    assert received.startswith(b"HTTP/1.1 413") and received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("form", ["Content-Length: 20000000", "Transfer-Encoding: chunked"])
def test_clients_that_send_a_whole_oversized_body_read_the_answer(form, monkeypatch):
    """The connection was closed with unread bytes, which resets it: such clients, and Envoy, lost the answer."""
    monkeypatch.setattr(errors, "DISCARD_SECONDS", 60.0)  # on a busy machine too
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\n{form}\r\n\r\n".encode()
    body = b" " * 20_000_000
    with real_server(FakeClient(), max_body_bytes=1000) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + (body if "Length" in form else b"1312d00\r\n" + body + b"\r\n0\r\n\r\n"))
            received = b""
            while data := connection.recv(65536):
                received += data
    assert received.startswith(b"HTTP/1.1 413") and received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_any_model_name_is_accepted_and_echoed(path):
    """The same as SGLang: snippets with another model's name work."""
    client = FakeClient()
    body = {"prompt": "x", **chat()}
    for name in ("tiny", "default", "/models/tiny", "gpt-4", "org/model-7B"):
        for settings in ({}, {"served_model_name": "other"}):
            response = post(client, path, {**body, "model": name}, **settings)
            assert (response.status_code, response.json()["model"]) == (200, name)
    assert post(client, path, body).json()["model"] == "tiny"
    refused = post(client, path, {**body, "model": "tiny:french"})
    assert refused.status_code == 400
    assert "'french' in 'tiny:french': names a LoRA adapter, and this server runs without" in refused.json()["message"]
    assert refused.json()["param"] == "model"


def test_unknown_models_are_not_listed():
    response = get(FakeClient(), "/v1/models/gpt-4")
    assert (response.status_code, response.json()["code"]) == (404, "model_not_found")
    assert "'gpt-4' does not exist; this server has 'tiny'" in response.json()["message"]
    for name in ("tiny", "default", "models/tiny"):
        assert get(FakeClient(), f"/v1/models/{name}").status_code == (404 if name == "models/tiny" else 200)
    assert get(FakeClient(), "/v1/models//models/tiny").json()["id"] == "tiny"


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [5.0, 6], "sampling_params": {"n": 1.0, "temperature": 1, "top_k": 3.0}},
        {"text": "a", "sampling_params": {"temperature": None, "stop": None, "max_new_tokens": None}, "rid": None},
        {"text": "a", "sampling_params": None, "stream": None, "return_logprob": None, "unknown": [1]},
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {}], "return_logprob": [True, None]},
        {"text": "a", "lora_path": None, "image_data": [], "return_hidden_states": False},
    ],
)
def test_numbers_nulls_and_unknown_fields_that_are_accepted(body):
    """5.0 is an integer, as in JSON Schema; null is the default."""
    assert post(FakeClient(), "/generate", body).status_code == 200


def test_template_refusal_and_no_template():
    client = FakeClient()
    response = post(client, "/v1/chat/completions", {"messages": [{"role": "function", "content": "x"}]})
    assert response.status_code == 400
    assert "unknown role function" in response.json()["message"]
    own, client.tokenizer.chat_template = client.tokenizer.chat_template, None
    try:
        response = post(client, "/v1/chat/completions", CHAT)
    finally:
        client.tokenizer.chat_template = own
    assert response.status_code == 400
    assert "--chat-template" in response.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [("/generate", {"text": "a"}, "text"), ("/v1/completions", {"prompt": "a"}, "prompt"),
     ("/v1/chat/completions", CHAT, "messages")],
)  # fmt: skip
def test_a_tokenizer_of_another_model_is_named(path, body, field):
    """A client that sends text knows no token ids."""
    error = post(FakeClient(vocab_size=2), path, body).json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field}: the tokenizer gives token id ")
    assert error["message"].endswith("its files are of another model, or have tokens without weights")


async def test_bad_request_does_not_affect_others():
    import asyncio

    client = FakeClient()
    client.delay = 0.002
    async with in_process(client) as http:
        good = [http.post("/generate", json={"text": "a"}) for _ in range(5)]
        bad = [http.post("/generate", content=json.dumps({"text": "a", "sampling_params": {"n": "x"}}))] * 1
        codes = [r.status_code for r in (await asyncio.gather(*good, *bad))]
    assert codes == [200] * 5 + [400]


def test_unexpected_exceptions_become_500():
    client = FakeClient()

    def broken(request):
        raise ZeroDivisionError("boom")

    client.script = broken
    response = post(client, "/v1/chat/completions", CHAT)
    assert response.status_code == 500
    assert "ZeroDivisionError: boom" in response.json()["error"]["message"]
    response = post(client, "/generate", {"text": "a", "stream": True})
    assert response.status_code == 500


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages"),
        ("/v1/generate", "/generate"), ("/v1/unheard", None), ("/unheard", None),
        ("/v1/chat/completion", "/v1/chat/completions"), ("/healthz", "/health"), ("/v1/embedding", "/v1/embeddings"),
    ],
)  # fmt: skip
def test_a_wrong_path_names_the_endpoint(path, near):
    response = post(FakeClient(), path, CHAT)
    error = response.json()["error"]["message"]
    words = f"no such endpoint; did you mean {near}?" if near else "no such endpoint"
    assert response.status_code == 404 and error == f"POST {path}: {words}"


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/v1/chat/completions", {**CHAT, "temprature": 0}, "no effect (did you mean temperature?)"),
        ("/v1/chat/completions", {**CHAT, "temperatur": 0.0, "n": 1.0}, "no effect (did you mean temperature?)"),
        ("/v1/completions", {"prompt": "a", "zzz": {"a": 1}}, "'zzz', which has no effect"),
        ("/generate", {"text": "a", "max_new_tokens": 5}, "has no effect: it belongs into sampling_params"),
        ("/configure_logging", {"log_request": True}, "no effect (did you mean log_requests?)"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_logged_once(path, body, line, caplog, monkeypatch):
    monkeypatch.setattr(unknown_fields, "_reported", set())
    for _ in range(2):
        assert post(FakeClient(), path, body).status_code == 200
    (found,) = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert found.endswith(line), found
    no_text = (json.dumps(CHAT)[:-1] + r', "\ud800": 1}').encode()
    assert post(FakeClient(), "/v1/chat/completions", no_text).status_code < 500


def test_clients_cannot_fill_the_log_with_names(caplog, monkeypatch):
    monkeypatch.setattr(unknown_fields, "_reported", set())
    post(FakeClient(), "/v1/chat/completions", {**CHAT, **{"a" * 100 + str(i): 1 for i in range(200)}})
    found = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(found) == unknown_fields.MAX_LINES and max(map(len, found)) < 160


def test_functions_names_its_successor():
    response = post(FakeClient(), "/v1/chat/completions", {**CHAT, "functions": [{"name": "a"}]})
    assert response.json()["param"] == "functions" and "send tools" in response.json()["message"]
