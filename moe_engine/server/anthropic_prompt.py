"""Requests in Anthropic's form as chat requests."""

from __future__ import annotations

import json
from typing import Any

from moe_engine.errors import InputError
from moe_engine.server.anthropic_types import CountRequest, MessagesRequest
from moe_engine.server.openai.images import PlacedImage
from moe_engine.server.openai.types import ChatRequest
from moe_engine.validation import checked, string_at

NAMES = (
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function", r"\1"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^tool_choice: required", "tool_choice: any"),
    (r"^stop\b", "stop_sequences"),
    (r"^max_thinking_tokens\b", "thinking.budget_tokens"),
    (r"\bresponse_format\.json_schema\.schema", "output_config.format.schema"),
    (r"^reasoning_effort\b", "output_config.effort"),
)
"""For errors: fields of chat requests, and Anthropic's names of them."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(
    req: CountRequest, *, limits_thinking: bool = False
) -> tuple[ChatRequest, list[dict[str, Any]], list[dict[str, Any]]]:
    """The request, its messages and its tools, in OpenAI's form.

    Args:
        limits_thinking: the server can enforce the budget of a reasoning; otherwise the budget has no effect.

    Raises:
        InputError: names the field of Anthropic's request.
    """
    messages = _messages(req)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(req.tools or ())]
    body: dict[str, Any] = {"messages": messages, "tools": tools or None, "model": req.model, **_choice(req)}
    if req.thinking is not None:
        kind = req.thinking["type"]
        on = messages[-1]["role"] == "tool" if kind == "between_tools" else kind != "disabled"
        body["reasoning"] = {"enabled": on}
        if limits_thinking and kind == "enabled":
            body["max_thinking_tokens"] = req.thinking.get("budget_tokens")
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and last.keys() == {"role", "content"}:
        body["continue_final_message"] = True
    config = req.output_config or {}
    if config.get("effort") is not None:
        body["reasoning_effort"] = config["effort"]
    if (form := config.get("format") or req.output_format) is not None:
        json_schema = {"name": "output", "schema": form["schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if isinstance(req, MessagesRequest):
        body |= {"max_tokens": req.max_tokens, "stream": req.stream, "stop": req.stop_sequences}
        for name in ("temperature", "top_p", "top_k"):
            if getattr(req, name) is not None:
                body[name] = getattr(req, name)
    return checked(body, ChatRequest), messages, tools


def _choice(req: CountRequest) -> dict[str, Any]:
    choice = req.tool_choice
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")}
    if choice["type"] != "tool":
        return {"tool_choice": CHOICES[choice["type"]], **parallel}
    if "name" not in choice:
        raise InputError.at("tool_choice.name", "is required with type tool")
    return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}, **parallel}


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InputError(f"{field}.type: {tool['type']!r:.60} is a tool of Anthropic's servers; send custom tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise InputError.at(f"{field}.input_schema", "is required")
    fields = {**tool, "parameters": tool["input_schema"]}
    names = ("name", "description", "parameters", "strict")  # in the order of OpenAI's clients, which templates show
    function = {name: fields[name] for name in names if fields.get(name) is not None}
    return {"type": "function", "function": function}


def _messages(req: CountRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if req.system:
        out.append({"role": "system", "content": _text(req.system, "system")})
    for i, message in enumerate(req.messages):
        content, field = message["content"], f"messages[{i}].content"
        if isinstance(content, str):
            out.append({"role": message["role"], "content": content})
        elif message["role"] == "assistant":
            out.append(_assistant(content, field))
        else:
            out += _user(content, message["role"], field, images=isinstance(req, MessagesRequest))
    return out


def _assistant(blocks: list[Any], field: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{field}[{i}]"
        if block["type"] == "text":
            texts.append(string_at(block, "text", place))
        elif block["type"] == "thinking":
            thoughts.append(string_at(block, "thinking", place))
        elif block["type"] == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            function = {"name": string_at(block, "name", place), "arguments": arguments}
            calls.append({"id": string_at(block, "id", place), "type": "function", "function": function})
        elif block["type"] != "redacted_thinking":
            raise _unavailable(block, place)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: list[Any], role: str, field: str, *, images: bool) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the text. `images`: whether they are available."""
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{field}[{i}]"
        if block["type"] == "tool_result":
            found = block.get("content") or ""
            if isinstance(found, str):
                found = [{"type": "text", "text": found}]
            shown = [_part(part, f"{place}.content[{j}]", images=images) for j, part in enumerate(found)]
            content = _joined(shown, "Error: " if block.get("is_error") else "")
            out.append({"role": "tool", "tool_call_id": string_at(block, "tool_use_id", place), "content": content})
        else:
            parts.append(_part(block, place, images=images))
    if parts or not out:
        out.append({"role": role, "content": _joined(parts)})
    return out


def _part(block: Any, place: str, *, images: bool) -> dict[str, Any]:
    """A part of a chat message: text, also of a document, or an image."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": string_at(block, "text", place)}
    if kind == "document":
        return {"type": "text", "text": _document(block, place)}
    if kind == "search_result":
        lines = (string_at(block, "title", place), string_at(block, "source", place), _content(block, place))
        return {"type": "text", "text": "\n\n".join(lines)}
    if kind != "image":
        raise _unavailable(block, place)
    if not images:
        raise InputError.at(place, "an image's number of tokens is known only once it is read; count the text alone")
    return PlacedImage(_image_address(block, place), f"{place}.source")


def _joined(parts: list[dict[str, Any]], before: str = "") -> str | list[dict[str, Any]]:
    """The content of a chat message: one text unless there are images."""
    if any(part["type"] != "text" for part in parts):
        return [{"type": "text", "text": before}, *parts] if before else parts
    return before + "\n".join(part["text"] for part in parts)


def _document(block: Any, place: str) -> str:
    """The title and the text of a document."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else source
    if kind not in ("text", "content"):
        raise InputError.at(f"{place}.source.type", f"documents of type {kind!r:.60} are not available here; send text")
    text = string_at(source, "data", f"{place}.source") if kind == "text" else _content(source, f"{place}.source")
    return f"{block['title']}\n\n{text}" if isinstance(block.get("title"), str) else text


def _content(block: Any, place: str) -> str:
    """The texts of `content`."""
    found, place = block.get("content"), f"{place}.content"
    if not isinstance(found, str | list):
        raise InputError.at(place, f"expected a string or a list, got {found!r:.60}")
    return _text(found, place)


def _image_address(block: Any, place: str) -> str:
    """The address of an image, a data address for base64."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise InputError.at(f"{place}.source", "is required")
    if source.get("type") not in ("base64", "url"):
        raise InputError.at(f"{place}.source.type", f"expected base64 or url, got {source.get('type')!r:.60}")
    if source["type"] == "url":
        return string_at(source, "url", f"{place}.source")
    kind, data = string_at(source, "media_type", f"{place}.source"), string_at(source, "data", f"{place}.source")
    if not kind.startswith("image/"):
        raise InputError.at(
            f"{place}.source.media_type", f"expected a type of images such as image/png, got {kind!r:.60}"
        )
    return f"data:{kind};base64,{data}"


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unavailable(block, f"{field}[{i}]")
        texts.append(string_at(block, "text", f"{field}[{i}]"))
    return "\n".join(texts)


def _unavailable(block: Any, place: str) -> InputError:
    kind = block.get("type") if isinstance(block, dict) else block
    return InputError.at(f"{place}.type", f"{kind!r:.60} is not available here; send text")
