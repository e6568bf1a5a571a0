"""/openapi.json: every endpoint has its types, and real answers match them.

The oracles are msgspec, FastAPI's model of an OpenAPI document, and the models of OpenAI's client.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import httpx
import msgspec
import pytest
from fastapi.openapi.models import OpenAPI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.server.anthropic_types import AnthropicError
from moe_engine.server.native_types import ServerInfo
from moe_engine.server.ollama_types import OllamaError
from moe_engine.server.openai.answers import Error, OpenAIError
from moe_engine.server.openapi import JSON
from moe_engine.tokenizer.tool_calls.named import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import CHAT, events, get, make_app, named_events, post, talk

ENDPOINTS = [endpoint for endpoint in make_app(FakeClient()).state.endpoints if endpoint.available]
BY_PATH = {path: endpoint for endpoint in reversed(ENDPOINTS) for path in endpoint.shown_paths}
ANTHROPIC = {"/v1/messages", "/v1/messages/count_tokens"}
OLLAMA = {"/api/chat", "/api/generate"}
UNTYPED_BODY = {
    "/flush_cache", "/reset_prefix_cache", "/start_expert_distribution_record", "/stop_expert_distribution_record",
    "/dump_expert_distribution_record", "/stop_profile", "/freeze_gc", "/clear_hicache_storage_backend",
    "/hicache/storage-backend/clear", "/v1/responses/{response_id}/cancel",
}  # fmt: skip
"""POST without a body."""
EMPTY = {"/abort_request", "/close_session", "/configure_logging", "/health", "/ready", "/ping", "/health_generate"}
"""Answers without a body."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = f'why</think>ok {CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": 1}}{CALL_END}{CALLS_END}'
PARSERS = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "deepseekv31"}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 0}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 90, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@lru_cache
def _description(settings: str) -> dict[str, Any]:
    return get(FakeClient(), "/openapi.json", **json.loads(settings)).json()


def description(**settings: Any) -> dict[str, Any]:
    """The description, created once for the same settings because it takes longer than a request."""
    return _description(json.dumps(settings, sort_keys=True))


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def is_empty(schema: dict[str, Any]) -> bool:
    """True if a schema accepts every value."""
    return not schema.keys() & {"$ref", "anyOf", "type", "enum"}


def test_every_route_is_described_with_its_types():
    found = description(enable_metrics=True)
    app = make_app(FakeClient())
    hidden = {path for endpoint in app.state.endpoints if not endpoint.available for path in endpoint.paths}
    served = {
        (route.path.replace(":path", ""), method)
        for route in app.routes
        for method in route.methods
        if route.path not in hidden and method != "HEAD"
    }
    assert served == {(path, method.upper()) for path, method, _ in operations(found)}
    for path, method, operation in operations(found):
        answers = operation["responses"]
        assert operation["summary"], path
        assert ("requestBody" in operation) == (method in ("post", "put") and path not in UNTYPED_BODY), path
        assert ("content" in answers["200"]) == (path not in EMPTY), path
        contents = [operation.get("requestBody", {}), *answers.values()]
        schemas = [
            each.get("itemSchema") or each["schema"]
            for content in contents
            for each in content.get("content", {}).values()
        ]
        assert schemas and not any(map(is_empty, schemas)), path


def test_the_description_is_openapi():
    found = description()
    OpenAPI.model_validate(found)
    identifiers = [operation["operationId"] for _, _, operation in operations(found)]
    assert len(set(identifiers)) == len(identifiers) and all(re.fullmatch(r"\w+", name) for name in identifiers)
    for path, _, operation in operations(found):
        parameters = operation.get("parameters", [])
        assert {p["name"] for p in parameters if p["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
    schemas = found["components"]["schemas"]
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(found)))
    assert references == schemas.keys(), "no dangling and no unused schema"


def test_bounds_and_defaults_of_this_server():
    settings = {"preferred_sampling_params": {"temperature": 0.25}, "sampling_defaults": {"top_p": 0.5}}
    schemas = description(**settings)["components"]["schemas"]
    native, chat, plain = (schemas[k]["properties"] for k in ("SamplingRequest", "ChatRequest", "CompletionRequest"))
    assert native["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 10000.0}
    assert [fields["temperature"]["default"] for fields in (native, chat, plain)] == [0.25, 1.0, 1.0]
    assert [fields["top_p"]["default"] for fields in (native, chat, plain)] == [1.0, 0.5, 0.5]
    assert (native["max_new_tokens"]["default"], chat["max_tokens"]["default"]) == (128, None)
    assert plain["max_tokens"]["default"] == 16
    assert schemas["ChatRequest"]["required"] == ["messages"]
    page = get(FakeClient(), "/docs").text
    for words in ("≥ 1, ≤ 128", "not available yet; leave it out", "<td>required", "<a href=#ChatRequest>"):
        assert words in page


def schema_of(kind: Any) -> dict[str, Any]:
    ((schema,), _) = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema


def conforms(value: Any, kind: Any) -> None:
    """Checks that every value has its type, and that the type has every field of the answer."""
    converted = json.loads(msgspec.json.encode(msgspec.convert(value, kind)))
    if kind is not ServerInfo:  # its flags are not listed
        assert converted == value


def answers_of(path: str, response: httpx.Response, kind: str = JSON) -> None:
    """Compares an answer with its type in the description."""
    endpoint = BY_PATH[path]
    assert response.status_code == 200, response.text
    (operation, *_) = description()["paths"][path].values()
    content = operation["responses"]["200"].get("content", {})
    assert response.headers.get("content-type", "").partition(";")[0] in (content or {"": None})
    if kind == JSON:
        assert content[JSON]["schema"] == schema_of(endpoint.answer)
        conforms(response.json(), endpoint.answer)
    else:
        error = AnthropicError if path in ANTHROPIC else OllamaError if path in OLLAMA else Error
        item = content[endpoint.stream]["itemSchema"]
        if path not in OLLAMA:
            data = item["properties"]["data"]
            item = (data if path in ANTHROPIC | {"/v1/responses"} else data["anyOf"][0])["contentSchema"]
        assert item["anyOf"] == [schema_of(endpoint.event), schema_of(error)]
        for event in streamed(path, response):
            conforms(event, endpoint.event)


def streamed(path: str, response: httpx.Response) -> list[Any]:
    if path in OLLAMA:
        return [json.loads(line) for line in response.text.splitlines()]
    return named_events(response) if path in ANTHROPIC | {"/v1/responses"} else events(response)


POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "Hello"}),
    ("/generate", {"text": ["Hello", "a"], **LOGPROBS, "return_text_in_logprobs": True}),
    ("/generate", {"input_ids": [5], "stream": True, **LOGPROBS}),
    ("/generate", {"text": "a", "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 3}}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], **USAGE}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "stop": "how", **USAGE}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": [5], "logprobs": 1, **USAGE}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", MESSAGES | {"stream": True}),
    ("/v1/responses", {"input": "hi", "tools": [FUNCTION]}),
    ("/v1/responses", {"input": "hi", "tools": [FUNCTION], "stream": True}),
    ("/v1/messages/count_tokens", CHAT),
    ("/api/chat", CHAT | {"tools": [TOOL]}),
    ("/api/chat", CHAT | {"tools": [TOOL], "stream": False}),
    ("/api/generate", {"prompt": "hi"}),
    ("/api/show", {}),
    ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}),
    ("/tokenize", {"prompt": ["Hello", "a"]}),
    ("/v1/tokenize", {**CHAT}),
    ("/detokenize", {"tokens": [[5], [6]]}),
    ("/v1/detokenize", {"tokens": [5]}),
    ("/separate_reasoning", {"text": CALLS}),
    ("/parse_function_call", {"text": CALLS, "tools": [TOOL]}),
]
VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["Hello", "a"]}),
    ("/v1/embeddings", {"input": "Hello", "encoding_format": "base64"}),
    ("/encode", {"text": "Hello"}),
    ("/encode", {"input_ids": [[5], [6, 7]]}),
    ("/classify", {"text": ["Hello"]}),
    ("/v1/score", {"query": "a", "items": ["b", "c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
    ("/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("/v1/classify", {"input": ["Hello", "a"]}),
]


@pytest.mark.parametrize(("path", "body"), VECTORS)
def test_vectors_conform(path, body):
    one_score = PoolingConfig("last", False, 1, "linear", ("LABEL_0",))
    fake = FakeClient(pooling=POOLING if "embeddings" in path else one_score)
    fake.vector = lambda request: array("f", [len(request.prompt_ids)])
    answers_of(path, post(fake, path, body))


OFFICIAL = {
    ("/v1/chat/completions", False): ChatCompletion,
    ("/v1/chat/completions", True): ChatCompletionChunk,
    ("/v1/completions", False): Completion,
    ("/v1/responses", False): Response,
}
"""Not for streams of /v1/completions and for `echo`: OpenAI's type does not allow the nulls in OpenAI's own answers."""


@pytest.mark.parametrize(("path", "body"), POSTS)
@pytest.mark.parametrize("text", ["Hello world, how are you today?", CALLS], ids=["text", "calls"])
def test_answers_to_posts_conform(path, body, text):
    in_stream = body.get("stream", path in OLLAMA)
    assert "requestBody" in next(iter(description()["paths"][path].values()))
    response = post(FakeClient(text), path, body, enable_cache_report=True, **PARSERS)
    answers_of(path, response, BY_PATH[path].stream if in_stream else JSON)
    official = OFFICIAL.get((path, in_stream))
    if official is not None and not body.get("echo"):
        for answer in streamed(path, response) if in_stream else [response.json()]:
            official.model_validate(answer)


STORED = "/v1/responses/{response_id}"
READS = [path for path, endpoint in BY_PATH.items() if endpoint.methods == ["GET"] and STORED not in path]


@pytest.mark.parametrize("path", READS)
def test_answers_to_gets_conform(path):
    client = FakeClient()
    rank = {"view": {"layers": 1, "experts": 2, "counts": [[3, 4]], "balancedness": {"current": 0.5}}}
    if path == "/experts/data":
        rank["view"] |= {"recording": True, "pass": 7}
        client.state = rank
    response = get(client, path.replace("{model}", "tiny"), enable_metrics=True)
    if BY_PATH[path].media == JSON and path not in EMPTY:
        answers_of(path, response)
    else:
        assert response.headers.get("content-type", "").partition(";")[0] == (
            "" if path in EMPTY else BY_PATH[path].media
        )
    if path == "/v1/models":
        Model.model_validate(response.json()["data"][0])


def test_answers_of_control_endpoints_have_the_described_type():
    for path, body in (("/flush_cache", b""), ("/abort_request", b'{"rid": "x"}')):
        response = post(FakeClient(), path, body)
        media = BY_PATH[path].media if path not in EMPTY else ""
        assert (response.status_code, response.headers.get("content-type", "").partition(";")[0]) == (200, media)


@pytest.mark.parametrize("path", sorted(BY_PATH))
def test_errors_conform(path):
    """Anthropic's form of an error under /v1/messages, Ollama's under /api, elsewhere OpenAI's with SGLang's fields,
    from every part of the server."""
    kind = AnthropicError if path in ANTHROPIC else OpenAIError
    kind = OllamaError if path.startswith("/api/") else kind
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    async def session(http: httpx.AsyncClient) -> list[httpx.Response]:
        key = {"Authorization": "Bearer k"}
        found = [await http.request("DELETE", path, headers=key)]
        if "POST" in BY_PATH[path].methods and BY_PATH[path].body is not None:
            found += [await http.post(path, content=b"{}", headers=headers | key)]
            found += [await http.post(path, content=b"5", headers=key)]
        if not path.startswith(("/health", "/ready", "/ping", "/metrics")) and path not in ("/", "/docs", "/experts"):
            found += [await http.request(BY_PATH[path].methods[0], path)] if path != "/openapi.json" else []
        return found

    (operation, *_) = description()["paths"][path].values()
    assert operation["responses"]["default"]["content"][JSON]["schema"] == schema_of(kind)
    for response in talk(FakeClient(), session, api_key="k"):
        assert response.status_code >= 400
        conforms(response.json(), kind)


def test_errors_within_a_stream_conform():
    client = FakeClient()
    client.fail_after = 2
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", MESSAGES),
    ):
        found = streamed(path, post(client, path, {**body, "stream": True}))
        conforms(found[-1], AnthropicError if path in ANTHROPIC else Error)
        for event in found[:-1]:
            conforms(event, BY_PATH[path].event)
        assert "SIGKILL" in json.dumps(found[-1])
