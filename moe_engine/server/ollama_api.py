"""Ollama's forms of chat, completion and lists of models, over the chat endpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moe_engine import __version__
from moe_engine.errors import InputError
from moe_engine.frontend.encoding import check_kind
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.bodies import Plan
from moe_engine.server.errors import ollama_body, stream_error
from moe_engine.server.event_stream import Events, EventStream
from moe_engine.server.field_names import named
from moe_engine.server.http_io import (
    cancel_on_disconnect,
    decode_body,
    decode_body_and_rest,
    encode_json,
    json_response,
    read_small,
)
from moe_engine.server.ollama_types import (
    Details,
    ListedModel,
    ModelTags,
    OllamaCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShownModel,
    ShowRequest,
    Version,
)
from moe_engine.server.openai.chat import ChatApi
from moe_engine.server.openai.choice import ChoiceParser, ParserOptions
from moe_engine.server.openai.images import PlacedImage
from moe_engine.server.openai.types import ChatRequest, CompletionRequest, generate_input
from moe_engine.server.openapi import JSON_LINES
from moe_engine.server.output_parts import OutputParts, Part, parts_of
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.fill_in_middle import fill_in_middle
from moe_engine.validation import checked, refuse_unavailable

LINE_END = b',"done":false}\n'
NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded."""
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
NAMES = (
    (rf"^({'|'.join(OPTIONS)})\b", r"options.\1"),
    (r"^repetition_penalty\b", "options.repeat_penalty"),
    (r"^max_tokens\b", "options.num_predict"),
    (r"^response_format(\.json_schema\.schema)?", "format"),
)
"""For errors: fields of OpenAI's requests, and Ollama's names of them."""
PROMPT_NAMES = (*NAMES, (r"(?<=\bShorten )messages\b", "prompt"))
"""`NAMES` of a prompt that becomes a message."""


class OllamaApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._chat = ChatApi(state)

    async def chat(self, request: Request) -> Response:
        """Ollama's chat."""
        return await self._answered(request, "ollama_chat")

    async def generate(self, request: Request) -> Response:
        """Ollama's answer to a prompt, as one message or as plain text."""
        return await self._answered(request, "ollama_generate")

    async def _answered(self, request: Request, name: str) -> Response:
        done = await self._state.bodies.plan_or_answer(request, name)
        if isinstance(done, Response):
            return done
        streams, model, is_chat, parsers = done.options
        with named(NAMES):
            begun = self._state.frontend.begin(done.read, self._state.token_json.chat)
            job = await cancel_on_disconnect(request, begun)
        lines = _Lines(model, is_chat, ChoiceParser(parsers))
        if streams:
            return JsonLines(self._state.frontend, job, lines, ollama_body)
        await cancel_on_disconnect(request, self._state.frontend.collect(job))
        return json_response(lines.whole(job.generations[0]))

    def read_chat(self, body: bytes | bytearray) -> Plan | Iterator[bytes]:
        """`Plan.options`: whether to stream, the model's name, True, `ParserOptions`."""
        check_kind(self._state.client.info, pooled=False)
        asked, whole = decode_body_and_rest(body, OllamaChatRequest)
        refuse_unavailable(asked)
        if not asked.messages:
            return self._loaded(asked, is_chat=True)
        messages = [_message(message, f"messages[{i}].images") for i, message in enumerate(asked.messages)]
        return self._chat_plan(asked, messages, whole.get("tools") or [], is_chat=True)

    def read_generate(self, body: bytes | bytearray) -> Plan | Iterator[bytes]:
        """`Plan.options`: as of `read_chat`, with False."""
        check_kind(self._state.client.info, pooled=False)
        asked = decode_body(body, OllamaGenerateRequest)
        refuse_unavailable(asked)
        if not asked.prompt:
            return self._loaded(asked, is_chat=False)
        if asked.raw or asked.suffix:
            return self._plain_plan(asked)
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        prompt = _message({"role": "user", "content": asked.prompt, "images": asked.images}, "images")
        return self._chat_plan(asked, [*system, prompt], [], is_chat=False)

    def _loaded(self, asked: OllamaRequest, *, is_chat: bool) -> Iterator[bytes]:
        """The answer to a request without a prompt, by which clients load a model."""
        lines = _Lines(self._model(asked), is_chat, ChoiceParser(ParserOptions()))
        yield encode_json({**lines.part(), "done": True, "done_reason": "load"})

    def _model(self, asked: OllamaRequest) -> str:
        return self._state.response_model(_without_tag(asked.model))

    def _chat_plan(
        self, asked: OllamaRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, is_chat: bool
    ) -> Plan:
        body = {**_sampling(asked), "messages": messages, "tools": tools or None}
        if asked.think is not None:
            body["reasoning"] = {"enabled": bool(asked.think)}
            if isinstance(asked.think, str):
                body["reasoning_effort"] = asked.think
        with named(NAMES if is_chat else PROMPT_NAMES):
            plan = self._chat.plan(checked(body, ChatRequest), messages, tools, reduce_length=True)
        return Plan(plan.read, (asked.stream is not False, self._model(asked), is_chat, plan.options[2]))

    def _plain_plan(self, asked: OllamaGenerateRequest) -> Plan:
        if asked.images:
            raise InputError.at("images", "not with raw or suffix; leave them out")
        tokenizer, text = self._state.tokenizer(), asked.prompt
        if asked.suffix:
            text = fill_in_middle(tokenizer, text, asked.suffix, self._state.flags.completion_template)
        with named(NAMES):
            req = checked({**_sampling(asked), "prompt": text}, CompletionRequest)
            defaults = {**self._state.settings.sampling_defaults, "max_new_tokens": None}
            read = self._state.frontend.read(
                generate_input(req, defaults, "max_tokens", text=text, text_field="prompt", max_tokens_asked=False)
            )
        return Plan(read, (asked.stream is not False, self._model(asked), False, ParserOptions()))

    async def tags(self, request: Request) -> Response:
        """The served model and its LoRA adapters, in Ollama's form."""
        names = [self._state.model_name, *self._state.frontend.adapters.paths]
        answer: ModelTags = {"models": [self._listed(name) for name in names]}
        return json_response(answer)

    async def loaded(self, request: Request) -> Response:
        """The served model and its LoRA adapters as loaded models, in Ollama's form."""
        info, device = self._state.client.info, self._state.settings.server_args.get("device", "cpu")
        more = {"expires_at": NEVER, "size_vram": 0 if device == "cpu" else info.weight_bytes}
        names = [self._state.model_name, *self._state.frontend.adapters.paths]
        return json_response(
            {"models": [{**self._listed(name), **more, "context_length": info.context_len} for name in names]}
        )

    async def show(self, request: Request) -> Response:
        """Facts of the served model, in Ollama's form."""
        asked = await read_small(request, ShowRequest)
        name = _without_tag(asked.model)
        if name is not None and name not in self._state.frontend.adapters.paths:
            self._state.find_model(name)
        info, flags = self._state.client.info, self._state.flags
        able = {
            "completion": info.pooling is None, "embedding": info.pooling is not None,
            "vision": info.vision is not None,
            "tools": flags.tool_call_parser is not None, "thinking": flags.reasoning_parser is not None,
        }  # fmt: skip
        kind = info.model_type
        answer: ShownModel = {
            "modified_at": _iso(self._state.started_at),
            "template": "",
            "parameters": "",
            "details": self._details(),
            "model_info": {"general.architecture": kind, f"{kind}.context_length": info.context_len},
            "capabilities": [word for word, is_able in able.items() if is_able],
        }
        return json_response(answer)

    async def version(self, request: Request) -> Response:
        """Version of this engine."""
        answer: Version = {"version": __version__}
        return json_response(answer)

    def _listed(self, name: str) -> ListedModel:
        return {
            "name": name,
            "model": name,
            "modified_at": _iso(self._state.started_at),
            "size": self._state.client.info.weight_bytes,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> Details:
        info = self._state.client.info
        return {
            "parent_model": "",
            "format": "gguf" if info.model_path.endswith(".gguf") else "safetensors",
            "family": info.model_type,
            "families": [info.model_type],
            "parameter_size": "",
            "quantization_level": info.dtype,
        }


class JsonLines(EventStream):
    """A stream with an object on each line."""

    media_type = JSON_LINES


class _Lines(Events):
    """Lines of a stream, or the whole answer; `is_chat`: with messages."""

    def __init__(self, model: str, is_chat: bool, parser: ChoiceParser) -> None:
        self._head = {"model": model, "created_at": _iso(time.time())}
        self._is_chat, self._parser, self._parts = is_chat, parser, OutputParts(parser)

    def part(self, text: str = "", thinking: str = "", calls: list[OllamaCall] | None = None) -> dict[str, Any]:
        """A part of an answer, without `done`."""
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**self._head, "response": text, **more}
        more |= {"tool_calls": calls} if calls else {}
        return {**self._head, "message": {"role": "assistant", "content": text, **more}}

    def of(self, piece: Piece) -> bytes:
        lines = b""
        if not self._parser.parses:
            lines = self._line(piece.text) if piece.text else b""
        else:
            for change, part, text in self._parts.push(piece):
                if part.kind == "call":
                    lines += self._line(calls=[_call(part)]) if change == "end" else b""
                elif change == "add":
                    lines += self._line(**{"text" if part.kind == "text" else "thinking": text})
        return lines if piece.finish is None else lines + encode_json(self.part() | _end(piece.generation)) + b"\n"

    def _line(self, text: str = "", **more: Any) -> bytes:
        return encode_json(self.part(text, **more))[:-1] + LINE_END

    def around_text(self, generation: Generation) -> tuple[bytes, bytes] | None:
        if self._parser.parses:
            return None
        before, _, after = self._line("\0").partition(encode_json("\0"))
        return before, after

    def failed(self, error: Exception) -> bytes:
        return stream_error(error, ollama_body)

    def whole(self, g: Generation) -> dict[str, Any]:
        if not self._parser.parses:
            return self.part(g.text) | _end(g)
        parts = parts_of(self._parser, g)
        text, thinking = ("".join(part.text for part in parts if part.kind == kind) for kind in ("text", "reasoning"))
        return self.part(text, thinking, [_call(part) for part in parts if part.kind == "call"]) | _end(g)


def _end(g: Generation) -> dict[str, Any]:
    begin, finish = g.received_at, g.finish or {}
    first = g.first_token_at or begin
    return {
        "done": True,
        "done_reason": finish.get("type"),
        "total_duration": _nanoseconds(time.monotonic() - begin),
        "load_duration": 0,
        "prompt_eval_count": len(g.prompt_ids),
        "prompt_eval_duration": _nanoseconds(first - begin),
        "eval_count": len(g.output_ids),
        "eval_duration": _nanoseconds((g.last_token_at or first) - first),
    }


def _nanoseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")


def _without_tag(model: str | None) -> str | None:
    """The name without the tag that Ollama's clients may add."""
    return None if model is None else model.removesuffix(":latest")


def _call(part: Part) -> OllamaCall:
    """A call of a tool. Arguments that are no JSON object are put into one."""
    try:
        arguments = msgspec.json.decode(part.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = part.text
    if not isinstance(arguments, dict):
        arguments = {"invalid_json": part.text}
    return {"function": {"name": part.name, "arguments": arguments}}


def _message(given: Any, images_field: str) -> dict[str, Any]:
    """A message in OpenAI's form; `images_field`: the client's name of its images."""
    message: dict[str, Any] = {"role": given["role"], "content": given.get("content", "")}
    if given.get("images"):
        images = [PlacedImage(image, f"{images_field}[{i}]") for i, image in enumerate(given["images"])]
        message["content"] = [*images, {"type": "text", "text": message["content"]}]
    if given.get("thinking"):
        message["reasoning_content"] = given["thinking"]
    if given.get("tool_calls"):
        calls = [call["function"] for call in given["tool_calls"]]
        message["tool_calls"] = [
            {"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}}
            for call in calls
        ]
    return message


def _sampling(asked: OllamaRequest) -> dict[str, Any]:
    """Fields of OpenAI's requests."""
    options = {} if asked.options is None else msgspec.structs.asdict(asked.options)
    body: dict[str, Any] = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    if options.get("repeat_penalty") is not None:
        body["repetition_penalty"] = options["repeat_penalty"]
    if (count := options.get("num_predict")) is not None and count > 0:
        body["max_tokens"] = count
    if asked.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif asked.format:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.format}}
    return {**body, "model": _without_tag(asked.model), "stream": asked.stream is not False}
