"""Requests of /v1/responses as chat requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from moe_engine.errors import InputError, TooLongError
from moe_engine.sampling_checks import SamplingFields
from moe_engine.server.openai.images import PlacedImage
from moe_engine.server.openai.types import ChatRequest
from moe_engine.server.responses.tools import chat_call, chat_choice, chat_tools
from moe_engine.server.responses.types import LOGPROBS, ResponsesRequest
from moe_engine.validation import checked, string_at

T = TypeVar("T")

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "reasoning_text": "text",
         "refusal": "refusal"}  # fmt: skip
"""The field with the text, by the kind of a part."""
SYSTEM_ROLES = ("system", "developer")
NAMES = (
    (r"^(tools\[\d+\])\.function", r"\1"),
    (r"^tool_choice\.allowed_tools\.(tools\[\d+\])\.function", r"tool_choice.\1"),
    (r"^tool_choice\.(function|allowed_tools)\b", "tool_choice"),
    (r"^max_tokens\b", "max_output_tokens"),
    (r"^messages\b|(?<=\bShorten )messages\b", "input"),
    (r"\bresponse_format\.json_schema\.schema", "text.format.schema"),
)
"""For errors: fields of chat requests, and their names in this API."""
SAME_NAME = (
    *SamplingFields.__struct_fields__, "model", "stream", "seed", "rid", "priority", "extra_key", "routed_dp_rank",
    "cache_salt", "lora_path", "parallel_tool_calls", "chat_template_kwargs", "user", "structured_outputs",
)  # fmt: skip
"""Fields with the same name in both requests."""


def chat_request(
    req: ResponsesRequest, messages: list[dict[str, Any]]
) -> tuple[ChatRequest, list[dict[str, Any]], list[dict[str, Any]]]:
    """The request, its messages and its tools, in chat form.

    Args:
        messages: of the whole conversation, without instructions.

    Raises:
        InputError: names the field of the request.
    """
    if req.instructions is not None:
        messages = [{"role": "system", "content": req.instructions}, *messages]
    tools = chat_tools(req.tools or ())
    body: dict[str, Any] = {name: getattr(req, name) for name in SAME_NAME if getattr(req, name) is not None}
    body |= {"messages": messages, "tools": tools or None, "max_tokens": req.max_output_tokens}
    body |= {"tool_choice": _choice(req.tool_choice), "response_format": _format(req)}
    if req.top_logprobs or LOGPROBS in (req.include or ()):
        body |= {"logprobs": True, "top_logprobs": req.top_logprobs or 0}
    if req.reasoning and req.reasoning.get("effort"):
        body["reasoning_effort"] = req.reasoning["effort"]
    return checked(body, ChatRequest), messages, tools


def check_options(req: ResponsesRequest) -> None:
    """Raises InputError for fields that contradict each other or this API."""
    if req.n not in (None, 1):
        raise InputError.at("n", f"a response has one output; got {req.n}")
    if req.background and req.stream:
        raise InputError.at(
            "stream",
            "is not available with background: true; leave out one, and request the response until it has ended",
        )
    if req.background and req.store is False:
        raise InputError.at("background", "needs store: true, as the answer is read from the store")


def shortened(messages: list[dict[str, Any]], plan_of: Callable[[list[dict[str, Any]]], T]) -> T:
    """The plan of the longest end of a conversation that fits into the context: `truncation: auto`. Whole turns are
    dropped, from the beginning; system messages and the last turn remain.

    Raises:
        TooLongError: the last turn alone is too long.
    """
    try:
        return plan_of(messages)
    except TooLongError:
        starts = shorter_starts(messages)
        if not starts:
            raise
    found, low, high = None, 0, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2
        try:
            found, high = plan_of(end_from(messages, starts[middle])), middle - 1
        except TooLongError:
            if middle == len(starts) - 1:
                raise
            low = middle + 1
    assert found is not None
    return found


def shorter_starts(messages: list[dict[str, Any]]) -> list[int]:
    """The turns with which a shortened conversation can begin (`end_from`): the second, the third, ..., the last."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    return [i for i, message in enumerate(messages) if message["role"] == "user" and i > first]


def end_from(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The conversation from message `start` on, with all system messages before it."""
    return [message for message in messages[:start] if message["role"] in SYSTEM_ROLES] + messages[start:]


def input_messages(
    given: str | list[Any], before: Iterable[dict[str, Any]] = (), field: str = "input"
) -> list[dict[str, Any]]:
    """The messages `before`, and those of an input. Consecutive items of the assistant are one message.

    Args:
        field: the client's name of the input.

    Raises:
        InputError: names the item.
    """
    out = list(before)
    if isinstance(given, str):
        return [*out, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        message = _message(item, f"{field}[{i}]")
        if message["role"] == "assistant" and out and out[-1]["role"] == "assistant":
            _join(out[-1], message)
        else:
            out.append(message)
    return out


def _join(message: dict[str, Any], more: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if more.get(name) is not None:
            message[name] = (message.get(name) or "") + more[name]
    if "tool_calls" in more:
        message["tool_calls"] = message.get("tool_calls", []) + more["tool_calls"]


def _message(item: Any, field: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        if "role" not in item:
            raise InputError.at(f"{field}.role", "is required")
        content = item.get("content")
        if item["role"] != "assistant" and isinstance(content, list) and any(map(_is_image, content)):
            return {"role": item["role"], "content": _parts(content, f"{field}.content")}
        return {"role": item["role"], "content": _text(content, f"{field}.content")}
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "content": None, "tool_calls": [chat_call(item, field)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        with_images = isinstance(output, list) and any(map(_is_image, output))
        content = _parts(output, f"{field}.output") if with_images else _text(output, f"{field}.output")
        return {"role": "tool", "tool_call_id": string_at(item, "call_id", field), "content": content}
    if kind == "reasoning":
        thoughts = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "content": None, "reasoning_content": _text(thoughts, f"{field}.content")}
    raise InputError.at(f"{field}.type", f"{kind!r:.60} is not available here")


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _parts(content: list[Any], field: str) -> list[dict[str, Any]]:
    """Texts and images as parts of a chat message."""
    found: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        place = f"{field}[{i}]"
        if not _is_image(part):
            found.append({"type": "text", "text": _text([part], field)})
        elif part.get("file_id") is not None:
            raise InputError.at(f"{place}.file_id", "files are not stored; send image_url")
        else:
            found.append(PlacedImage(string_at(part, "image_url", place), f"{place}.image_url"))
    return found


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError.at(field, f"expected a string or a list of parts, got {content!r:.60}")
    texts = []
    for i, part in enumerate(content):
        place = f"{field}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else part
        name = TEXTS.get(str(kind)) if isinstance(part, dict) else None
        if name is None:
            raise InputError.at(f"{place}.type", f"{kind!r:.60} is not available here; send text")
        texts.append(string_at(part, name, place))
    return "".join(texts)


def _choice(choice: Any) -> Any:
    """A choice of this API in the form of chats, whose names of functions are one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return chat_choice(choice)
    tools = choice.get("tools")
    deeper = [chat_choice(tool) for tool in tools] if isinstance(tools, list) else tools
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": deeper}}


def _format(req: ResponsesRequest) -> dict[str, Any] | None:
    found = (req.text or {}).get("format")
    if found is None or found["type"] == "text":
        return None
    if found["type"] == "json_object":
        return {"type": "json_object"}
    if "schema" not in found:
        raise InputError.at("text.format.schema", "is required")
    return {"type": "json_schema", "json_schema": {name: value for name, value in found.items() if name != "type"}}


def repeated_fields(req: ResponsesRequest) -> dict[str, Any]:
    """The fields of the request that its response repeats."""
    return {
        "background": bool(req.background),
        "instructions": req.instructions,
        "max_output_tokens": req.max_output_tokens,
        "metadata": req.metadata or {},
        "parallel_tool_calls": req.parallel_tool_calls is not False,
        "previous_response_id": req.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(req.reasoning or {})},
        "store": req.store is not False,
        "temperature": req.temperature,
        "text": {"format": {"type": "text"}, **{k: v for k, v in (req.text or {}).items() if v is not None}},
        "tool_choice": req.tool_choice or "auto",
        "tools": [_repeated(tool) for tool in msgspec.to_builtins(req.tools or [])],
        "top_logprobs": req.top_logprobs or 0,
        "top_p": req.top_p,
        "truncation": req.truncation or "disabled",
        "user": req.user,
    }


def _repeated(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
