"""OpenAPI description of all endpoints: /openapi.json, and /docs as an HTML page. Both work offline."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_engine.server.openai_types import ChatRequest, CompletionRequest

JSON = "application/json"
TEXT = "text/plain"
HTML = "text/html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Endpoint:
    """Description of an endpoint.

    Args:
        content: media type of its response; None: an empty body.
        streams: whether the response may be an event stream instead.
        body: JSON schema of the request's body, or None.
        query: parameters in the query: name to type.
    """

    path: str
    methods: tuple[str, ...]
    summary: str
    content: str | None = JSON
    streams: bool = False
    body: dict[str, Any] | None = None
    query: tuple[tuple[str, str], ...] = ()


def _object(**types: str) -> dict[str, Any]:
    """A JSON schema from field types; `*` marks required fields."""
    any_of = {name: {} if kind.strip("*") == "any" else {"type": kind.strip("*")} for name, kind in types.items()}
    required = [name for name, kind in types.items() if kind.endswith("*")]
    return {"type": "object", "properties": any_of} | ({"required": required} if required else {})


def _reference(kind: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_TOKENIZE = _object(prompt="any", messages="array", add_special_tokens="boolean")
_DETOKENIZE = _object(tokens="array*", skip_special_tokens="boolean")
_GENERATE = _object(
    text="any", input_ids="array", sampling_params="any", stream="boolean", rid="any", return_logprob="any",
    logprob_start_len="any", top_logprobs_num="any", token_ids_logprob="array",
)  # fmt: skip
_LOADS = (("dp_rank", "integer"), ("include", "string"), ("format", "string"))
_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")

ENDPOINTS = (
    Endpoint("/v1/chat/completions", _POST, "Chat completion", streams=True, body=_reference(ChatRequest)),
    Endpoint("/v1/completions", _POST, "Text completion", streams=True, body=_reference(CompletionRequest)),
    Endpoint("/v1/models", _GET, "The served model"),
    Endpoint("/v1/models/{model}", _GET, "The served model, by name"),
    Endpoint("/generate", ("POST", "PUT"), "Generation, SGLang's format", streams=True, body=_GENERATE),
    Endpoint("/abort_request", _POST, "Aborts requests", None, body=_object(rid="string", abort_all="boolean")),
    Endpoint("/flush_cache", _BOTH, "Clears the prefix cache", TEXT, query=(("timeout", "number"),)),
    Endpoint("/tokenize", _POST, "Token ids of texts or of a conversation", body=_TOKENIZE),
    Endpoint("/v1/tokenize", _POST, "Same as /tokenize", body=_TOKENIZE),
    Endpoint("/detokenize", _POST, "Text of token ids", body=_DETOKENIZE),
    Endpoint("/v1/detokenize", _POST, "Same as /detokenize", body=_DETOKENIZE),
    Endpoint(
        "/separate_reasoning", _POST, "Separates reasoning from content",
        body=_object(text="string*", reasoning_parser="string"),
    ),
    Endpoint(
        "/parse_function_call", _POST, "Parses tool calls in a text",
        body=_object(text="string*", tools="array*", tool_call_parser="string"),
    ),
    Endpoint("/health", _GET, "200 while the engine is healthy, else 503 with the reason", None),
    Endpoint("/ready", _GET, "Same as /health", None),
    Endpoint("/ping", _GET, "Same as /health", None),
    Endpoint("/health_generate", _GET, "200 after generating one token", None),
    Endpoint("/model_info", _GET, "Model information"),
    Endpoint("/get_model_info", _GET, "Old name of /model_info"),
    Endpoint("/server_info", _GET, "Every flag with its value, memory, throughput"),
    Endpoint("/get_server_info", _GET, "Old name of /server_info"),
    Endpoint("/v1/loads", _GET, "Requests and tokens of each data-parallel rank", query=_LOADS),
    Endpoint("/get_load", _GET, "Old form of /v1/loads"),
    Endpoint("/start_expert_distribution_record", _BOTH, "Starts expert recording", TEXT),
    Endpoint("/stop_expert_distribution_record", _BOTH, "Stops expert recording", TEXT),
    Endpoint("/dump_expert_distribution_record", _BOTH, "Writes the recorded counts to the server's dump folder", TEXT),
    Endpoint("/experts", _GET, "Live page of the experts", HTML),
    Endpoint("/experts/data", _GET, "Data of the live page"),
    Endpoint("/metrics", _GET, "Prometheus metrics, with --enable-metrics", TEXT),
    Endpoint("/", _GET, "List of endpoints"),
    Endpoint("/docs", _GET, "This page", HTML),
    Endpoint("/openapi.json", _GET, "OpenAPI description (JSON)"),
)  # fmt: skip


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    _, schemas = msgspec.json.schema_components(
        (ChatRequest, CompletionRequest), ref_template="#/components/schemas/{name}"
    )
    error = _object(error="object*")
    return {
        "openapi": "3.1.0",
        "info": {"title": "moe-engine", "version": version},
        "paths": {
            endpoint.path: {method.lower(): _operation(endpoint, method) for method in endpoint.methods}
            for endpoint in ENDPOINTS
        },
        "components": {
            "schemas": {**schemas, "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint, method: str) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.content: {}} if endpoint.content else {}
    if endpoint.streams:
        content["text/event-stream"] = {}
    names = re.findall(r"\{(\w+)\}", endpoint.path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    parameters += [{"name": n, "in": "query", "schema": {"type": kind}} for n, kind in endpoint.query]
    ok: dict[str, Any] = {"description": "Success"} | ({"content": content} if content else {})
    failed = {"description": "Failure", "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", endpoint.path)]),
        "summary": endpoint.summary,
        "responses": {"200": ok, "default": failed},
    }
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": endpoint.body}}}
    return operation


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>moe-engine: endpoints</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; vertical-align: top }}
pre {{ overflow-x: auto; background: #8882; padding: 1rem }}
</style>
<h1>moe-engine {version}</h1>
<p>OpenAI's and SGLang's HTTP interfaces. <a href="openapi.json">openapi.json</a> describes them for programs.
With <code>--api-key</code>, send the header <code>Authorization: Bearer KEY</code>.</p>
<pre>curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'</pre>
<table><tr><th>Method<th>Path<th><th>Fields of the body or the query
{rows}
</table>
"""


def docs_page(version: str, url: str) -> str:
    """HTML of /docs. `url`: the server's URL as seen by the client."""
    schemas = openapi(version)["components"]["schemas"]
    rows = "\n".join(
        f"<tr><td>{' '.join(endpoint.methods)}<td><code>{html.escape(endpoint.path)}</code>"
        f"<td>{html.escape(endpoint.summary)}<td>{', '.join(_fields(endpoint, schemas))}"
        for endpoint in ENDPOINTS
    )
    return _PAGE.format(version=html.escape(version), url=html.escape(url), rows=rows)


def _fields(endpoint: Endpoint, schemas: dict[str, Any]) -> Iterable[str]:
    schema = endpoint.body or {}
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    names = [*schema.get("properties", ()), *(name for name, _ in endpoint.query)]
    required = schema.get("required", ())
    return (f"<b>{name}</b>" if name in required else name for name in names)
