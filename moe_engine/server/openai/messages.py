"""Prompt of a conversation, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from moe_engine.errors import InputError
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS
from moe_engine.tokenizer.tool_calls.counted_ids import with_counted_ids


class Options(Protocol):
    """Fields of a request that shape the prompt."""

    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as a template reads it: a function without parameters may leave them out in a request."""
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}


def render_prompt(
    state: ServerState,
    messages: list[dict[str, Any]],
    options: Options,
    tools: list[dict[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation.

    Args:
        messages: of the form `types.Message`.
        kwargs: further template arguments, above those of the launch and below those of `options`.

    Raises:
        InputError: no template, or messages rejected by it.
    """
    for i, message in enumerate(messages):
        if message.get("content") is None and message["role"] != "assistant":
            raise InputError.at(f"messages[{i}].content", "is required")
    if state.chat_template is None:
        raise InputError(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
        )
    form = state.flags.tool_call_parser
    if form is not None and TOOL_FORMATS[form].counts_ids:
        messages = with_counted_ids(messages)
    arguments = state.template_arguments(kwargs) | (options.chat_template_kwargs or {})
    offered = [_with_parameters(tool) for tool in tools or ()]
    if options.continue_final_message:
        if messages[-1]["role"] != "assistant" or not isinstance(messages[-1].get("content"), str):
            raise InputError.at("continue_final_message", "the last message must be the assistant's, with text")
        if len(messages) == 1:
            raise InputError.at("messages", "there is no message before the one to be continued")
        return state.chat_template.render_continued(messages, tools=offered, kwargs=arguments)
    asks = options.add_generation_prompt is not False
    return state.chat_template.render(messages, tools=offered, add_generation_prompt=asks, kwargs=arguments)
