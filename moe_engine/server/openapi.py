"""OpenAPI description of all endpoints, made from their types: /openapi.json, and /docs as HTML. Both work offline."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_engine.sampling_checks import SamplingRequest
from moe_engine.server.anthropic_types import AnthropicError
from moe_engine.server.errors import Handler, anthropic_body, error_format_of, ollama_body
from moe_engine.server.ollama_types import OllamaError
from moe_engine.server.openai.answers import Error, OpenAIError
from moe_engine.server.openai.types import DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest
from moe_engine.types import SamplingParams

JSON = "application/json"
TEXT = "text/plain"
HTML = "text/html"
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Endpoint:
    """An endpoint with the types of its request and answer.

    Args:
        aliases: further paths.
        verbs: HTTP methods, separated by blanks.
        handler: its docstring's first line describes the endpoint.
        answer: type of the whole answer; None: an empty body.
        media: media type of the whole answer.
        body: type of the request's body, or None.
        event: type of an event's data, if the answer may be a stream.
        stream: media type of the stream.
        names_events: the events of the stream have names; otherwise the last one is [DONE].
        refuses_so: an answer with status 400 may have the type `answer` too (its `success` is false).
        query: type of the query, or None.
        available: False: answers 501 and is not described.
    """

    path: str
    handler: Handler
    verbs: str = "GET"
    answer: Any = None
    media: str = JSON
    body: Any = None
    event: Any = None
    stream: str = EVENTS
    names_events: bool = False
    refuses_so: bool = False
    query: Any = None
    available: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [self.path, *self.aliases]

    @property
    def shown_paths(self) -> list[str]:
        return [path.replace(":path}", "}") for path in self.paths] if self.available else []

    @property
    def methods(self) -> list[str]:
        return self.verbs.split()

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").partition("\n")[0].rstrip(".")


def openapi(
    endpoints: Iterable[Endpoint], version: str, native: SamplingParams, model: SamplingParams
) -> dict[str, Any]:
    """The OpenAPI 3.1 description. `native`, `model`: sampling defaults of /generate and of the OpenAI endpoints."""
    described = [endpoint for endpoint in endpoints if endpoint.available]
    kinds = [kind for e in described for kind in (e.answer, e.body, e.event, e.query) if kind is not None]
    kinds += [Error, OpenAIError, AnthropicError, OllamaError]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, found, strict=True))
    for kind, params in ((SamplingRequest, native), (ChatRequest, model), (CompletionRequest, model)):
        fields = components[kind.__name__]["properties"]
        for name, value in msgspec.to_builtins(params).items():
            if name in fields and value not in (None, ()):
                fields[name]["default"] = value
    components["CompletionRequest"]["properties"]["max_tokens"]["default"] = DEFAULT_MAX_TOKENS
    queries = {e.query: components.pop(e.query.__name__)["properties"] for e in described if e.query}
    paths: dict[str, dict[str, Any]] = {}
    for e in described:
        for path in e.shown_paths:
            methods = {method.lower(): _operation(e, path, method, schemas, queries) for method in e.methods}
            paths.setdefault(path, {}).update(methods)
    return {
        "openapi": "3.1.0",
        "info": {"title": "moe-engine", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _errors_of(path: str) -> tuple[Any, Any]:
    """Types of the errors of a path: as an answer, and within a stream."""
    shape = error_format_of(path)
    if shape is anthropic_body:
        return AnthropicError, AnthropicError
    if shape is ollama_body:
        return OllamaError, OllamaError
    return OpenAIError, Error


def _operation(
    endpoint: Endpoint, path: str, method: str, schemas: dict[Any, Any], queries: dict[Any, Any]
) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    query = queries.get(endpoint.query, {})
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    parameters += [{"name": n, "in": "query", "schema": schema} for n, schema in query.items()]
    error, stream_error = (schemas[kind] for kind in _errors_of(path))
    ok: dict[str, Any] = {"description": "Success"}
    if endpoint.answer is not None:
        ok["content"] = {endpoint.media: {"schema": schemas[endpoint.answer]}}
    if endpoint.event is not None:
        ok["description"] = "With stream: events"
        data = [schemas[endpoint.event], stream_error]
        event = {"anyOf": data} if endpoint.stream == JSON_LINES else _event(data, names=endpoint.names_events)
        ok["content"][endpoint.stream] = {"itemSchema": event}
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": endpoint.summary,
        "responses": {"200": ok, "default": {"description": "Failure", "content": {JSON: {"schema": error}}}},
    }
    if endpoint.refuses_so:
        content = {JSON: {"schema": {"anyOf": [schemas[endpoint.answer], error]}}}
        operation["responses"]["400"] = {"description": "Refused", "content": content}
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None and method.lower() != "get":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[endpoint.body]}}}
    return operation


def _event(kinds: list[Any], *, names: bool) -> dict[str, Any]:
    """An event of a stream: as OpenAPI 3.2 and FastAPI describe it, with the JSON of `data` as one of `kinds`."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": kinds}}
    if names:
        fields, required = {"event": {"type": "string"}, "data": data}, ["event", "data"]
    else:
        fields, required = {"data": {"anyOf": [data, {"const": "[DONE]"}]}}, ["data"]
    return {"type": "object", "properties": fields, "required": required}


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>moe-engine: endpoints</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem }}
a {{ color: light-dark(#1f6feb, #4c8dff) }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; min-width: 50rem }}
td, th {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; vertical-align: top }}
td:nth-child(2) {{ overflow-wrap: anywhere; min-width: 15rem }}
h1, h2 {{ overflow-wrap: anywhere }}
pre {{ overflow-x: auto; background: #8882; padding: 1rem }}
</style>
<h1>moe-engine {version}</h1>
<p><a href="./">state and chat</a> <a href="experts">experts</a> <a href="doctor">doctor</a></p>
<p>OpenAI's and SGLang's HTTP interfaces. <a href="openapi.json">openapi.json</a> describes them for programs.
With <code>--api-key</code>, send the header <code>Authorization: Bearer KEY</code>.</p>
<pre>curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'</pre>
<div><table><tr><th>Method<th>Path<th>Purpose<th>Query<th>Body<th>Answer
{rows}
</table></div>
{types}
"""


def docs_page(description: dict[str, Any], url: str) -> str:
    """HTML of /docs. `url`: the server's URL as seen by the client."""
    rows = "\n".join(
        f"<tr><td>{' '.join(methods).upper()}<td><code>{html.escape(path)}</code>"
        f"<td>{html.escape(next(iter(methods.values()))['summary'])}<td>{'<td>'.join(_cells(methods))}"
        for path, methods in description["paths"].items()
    )
    types = "\n".join(
        f"<h2 id={name}>{name}</h2>\n<p>{html.escape(schema.get('description', ''))}\n"
        f"<div><table><tr><th>Field<th>Type<th>Default<th>\n{_fields(schema)}\n</table></div>"
        for name, schema in description["components"]["schemas"].items()
    )
    return _PAGE.format(
        version=html.escape(description["info"]["version"]), url=html.escape(url), rows=rows, types=types
    )


def _cells(methods: dict[str, Any]) -> Iterator[str]:
    """Query, body and answer of an endpoint."""
    operation = next(iter(methods.values()))
    queries = (p for p in operation.get("parameters", ()) if p["in"] == "query")
    yield "<br>".join(f"{p['name']}: {_type(p['schema'])}" for p in queries)
    for part in (operation.get("requestBody", {}), operation["responses"]["200"]):
        yield "<br>".join(
            _type(_shown(content)) + ("" if kind == JSON else f" ({kind})")
            for kind, content in part.get("content", {}).items()
        )


def _shown(content: dict[str, Any]) -> Any:
    """The schema of the content; of a stream that of an event's JSON."""
    if "itemSchema" not in content:
        return content["schema"]
    if "anyOf" in content["itemSchema"]:
        return content["itemSchema"]
    data = content["itemSchema"]["properties"]["data"]
    return data.get("anyOf", [data])[0]["contentSchema"]


def _fields(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = html.escape(json.dumps(field["default"])) if "default" in field else ""
        default = "required" if name in schema.get("required", ()) else default
        words = html.escape(_description(field))
        rows.append(f"<tr><td><code>{name}</code><td>{_type(field)}<td>{default}<td>{words}")
    return "\n".join(rows)


def _description(schema: dict[str, Any]) -> str:
    found = [part.get("description", "") for part in (schema, *schema.get("anyOf", ()))]
    return next(filter(None, found), "")


def _type(schema: dict[str, Any]) -> str:
    """The type of a schema with its bounds, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(html.escape(json.dumps(value)) for value in schema["enum"])
    words = schema.get("type", "anything")
    if isinstance(schema.get("items"), dict):
        words += f" of ({_type(schema['items'])})"
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([words, html.escape(", ".join(bounds))]).rstrip()


_BOUNDS = {
    "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤",
    "minItems": "items ≥", "maxItems": "items ≤", "maxProperties": "entries ≤", "pattern": "",
}  # fmt: skip
