"""Validation of chat messages and tools; prompt rendering with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_engine.errors import InputError
from moe_engine.server.state import ServerState

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Checks the shape of the messages and returns them.

    Raises:
        InputError: names the message and the field.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("messages: expected a list with at least one message", field="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InputError(f"{where}: expected an object with role and content", field=where)
        role = message.get("role")
        if role not in ROLES:
            raise InputError(
                f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r:.40}", field=f"{where}.role"
            )
        _check_content(message, role, where)
        _check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    return messages


def _check_content(message: Mapping[str, Any], role: str, where: str) -> None:
    where = f"{where}.content"
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise InputError(f"{where}: is required", field=where)
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InputError(f"{where}: expected a string or a list of parts, got {content!r:.80}", field=where)
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InputError(
                f"{where}[{j}].type: only 'text' parts are available, got {kind!r:.40}", field=f"{where}[{j}].type"
            )
        if not isinstance(part.get("text"), str):
            raise InputError(f"{where}[{j}].text: expected a string", field=f"{where}[{j}].text")


def _check_tool_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InputError(f"{where}: expected a list", field=where)
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{where}[{j}].function.name: expected a string", field=f"{where}[{j}].function.name")


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Checks the tools and returns them.

    Raises:
        InputError: names the entry.
    """
    for i, tool in enumerate(tools or []):
        if tool.get("type", "function") != "function":
            raise InputError(f"tools[{i}].type: only 'function' is available", field=f"tools[{i}].type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"tools[{i}].function.name: expected a string", field=f"tools[{i}].function.name")
    return tools or []


def render_prompt(
    state: ServerState, messages: Any, options: Mapping[str, Any], tools: list[dict[str, Any]] | None = None
) -> str:
    """The prompt of a conversation. `options`: chat_template_kwargs, continue_final_message, add_generation_prompt.

    Raises:
        InputError: no template, an invalid message, or one rejected by the template.
    """
    checked = check_messages(messages)
    if state.chat_template is None:
        raise InputError(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
        )
    kwargs = options.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InputError("chat_template_kwargs: expected an object", field="chat_template_kwargs")
    prefix = ""
    if options.get("continue_final_message"):
        last = checked[-1]
        if last["role"] != "assistant" or not isinstance(last.get("content"), str):
            raise InputError(
                "continue_final_message: the last message must be the assistant's, with text",
                field="continue_final_message",
            )
        checked, prefix = checked[:-1], last["content"]
        if not checked:
            raise InputError("messages: there is no message before the one to be continued", field="messages")
    add_prompt = options.get("add_generation_prompt")
    if add_prompt is not None and not isinstance(add_prompt, bool):
        raise InputError("add_generation_prompt: expected true or false", field="add_generation_prompt")
    rendered = state.chat_template.render(
        checked, tools=tools, add_generation_prompt=add_prompt is not False or bool(prefix), kwargs=kwargs
    )
    return rendered + prefix
