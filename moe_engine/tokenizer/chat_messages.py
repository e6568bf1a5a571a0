"""Messages in the form that chat templates and encoders read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from moe_engine.errors import InputError

DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41, KIMI_K3 = "deepseek-v32", "deepseek-v4", "deepseek-v41", "kimi-k3"
GME_QWEN2_VL = "gme-qwen2-vl"
BUILT_IN_TEMPLATES = (DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41, KIMI_K3, GME_QWEN2_VL)
"""Names for `--chat-template`."""
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}


class ChatEncoder(Protocol):
    """Writes the prompt of a conversation: a Jinja template, or the encoder of a model that has none."""

    @property
    def reads_parts(self) -> bool:
        """Whether it loops over the parts of a message; else it gets their text joined."""

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """Names of the parsers of reasoning and of tool calls in answers; None: no known format."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            add_generation_prompt: False leaves out the opening of an answer at the end.
            kwargs: template arguments, such as `thinking` or `enable_thinking`.

        Raises:
            InputError: the conversation is refused, or a template argument that the server sets.
        """

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation whose last message, an assistant's with text, is continued. Arguments as of
        `render`. Raises InputError: the conversation is refused."""
        return self.render(messages[:-1], tools=tools, kwargs=kwargs) + self.begun(messages[-1], kwargs)

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        """The text of an unfinished answer, after the prompt that opens it."""
        text: str = message["content"]
        return text


def refuse_reserved(kwargs: Mapping[str, Any] | None) -> None:
    """
    Raises:
        InputError: a template argument that the server sets.
    """
    if clash := _RESERVED & set(kwargs or {}):
        where = f"chat_template_kwargs.{min(clash)}"
        raise InputError.at(where, "is set by the server; leave it out")


def prepare_message(message: Mapping[str, Any], *, keep_parts: bool) -> dict[str, Any]:
    """Converts a message for templates: parts joined unless the template loops over them, arguments as objects."""
    out = dict(message)
    content = out.get("content")
    if isinstance(content, list) and not keep_parts:
        out["content"] = " ".join(part["text"] for part in content)
    elif content is None and not out.get("tool_calls"):
        out["content"] = ""
    else:
        out["content"] = content
    if out.get("tool_calls"):
        out["tool_calls"] = [map_arguments(call, _arguments_object) for call in out["tool_calls"]]
    else:
        out.pop("tool_calls", None)
    return out


def map_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    function["arguments"] = change(function.get("arguments"))
    return {**call, "function": function}


def _arguments_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments) if arguments else {}
        except ValueError:
            return arguments
    return arguments if arguments is not None else {}
