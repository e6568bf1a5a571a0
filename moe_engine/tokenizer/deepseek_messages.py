"""The common part of the message encoders of DeepSeek V3.2, V4 and V4.1, whose checkpoints have no template but an
encoder in Python: order of the turns, marks, thinking, tool calls (DSML), and the vendor's texts, which are read from
that encoder's file."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer.chat_messages import ChatEncoder, prepare_message, refuse_reserved
from moe_engine.tokenizer.reasoning import THINK_END, THINK_START
from moe_engine.tokenizer.tool_calls.tagged import DSML

logger = logging.getLogger("moe_engine")

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SCHEMAS = "{tool_schemas}"
_PLACEHOLDERS = {"{dsml_token}": DSML, "{thinking_start_token}": THINK_START, "{thinking_end_token}": THINK_END}
_PROMPTS = ("system", "developer", "user")


@dataclass(frozen=True)
class DeepseekChat(ChatEncoder, ABC):
    """Writes prompts as a chat template does. Turns are prepared messages, with their `index` in the request.

    Args:
        tools_text: the text that explains the tools, with the placeholders `{tool_schemas}` and of the markers.
    """

    tools_text: str
    bos: str = BOS
    eos: str = EOS
    reads_parts = False
    model: ClassVar[str]
    calls_tag: ClassVar[str]
    """Around the tool calls of an answer."""
    mark: ClassVar[str] = DSML
    """Before the names of the tags of tool calls."""
    system_asks: ClassVar[bool] = False
    """System messages after the first turn are prompts."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """See `ChatEncoder`. With `thinking` (or `enable_thinking`) in `kwargs` the answer begins inside the reasoning.
        Other arguments have no effect, except those of `begin`.

        Raises:
            InputError: an unknown role, arguments that are no object, a result without a call (V3.2).
        """
        refuse_reserved(kwargs)
        thinking = thinks(kwargs)
        turns, first = self.turns(messages, thinking, bool(tools))
        described = f"\n\n{explain_tools(self.tools_text, tools)}" if tools else ""
        out = [self.bos, self.begin(turns, thinking, kwargs)]
        if described and (not turns or turns[0]["role"] != "system"):
            out.append(described)
        for i, turn in enumerate(turns):
            if turn["role"] == "system" and not (i and self.system_asks):
                out.append(turn["content"] + (described if i == 0 else ""))
            elif turn["role"] == "assistant":
                out.append(self._answer(turn, thinking and i > first))
            else:
                text, opening = self.prompt(turns, i)
                out.append(text)
                if opening is not None and (add_generation_prompt or i + 1 < len(turns)):
                    out.append(opening + (THINK_START if thinking and i >= first else THINK_END))
        return "".join(out)

    @abstractmethod
    def turns(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool, has_tools: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """The turns of a conversation; with thinking, answers after turn `first` have reasoning: (turns, first)."""

    def begin(self, turns: Sequence[Mapping[str, Any]], thinking: bool, kwargs: Mapping[str, Any] | None) -> str:
        """Text before the first turn."""
        return ""

    @abstractmethod
    def prompt(self, turns: Sequence[Mapping[str, Any]], i: int) -> tuple[str, str | None]:
        """Text of turn i, which is a prompt; and what opens an answer after it, before the
        tag of the reasoning. None: no answer follows it."""

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        """The beginning of an answer: in thinking mode the reasoning and its end come first. Without content the
        reasoning continues."""
        content: str = message["content"]
        reasoning = message.get("reasoning_content") or ""
        if not thinks(kwargs):
            return content
        return f"{reasoning}{THINK_END}{content}" if content else reasoning

    def _answer(self, turn: Mapping[str, Any], with_reasoning: bool) -> str:
        reasoning = f"{turn.get('reasoning_content') or ''}{THINK_END}" if with_reasoning else ""
        content = turn.get("content") or ""
        if calls := turn.get("tool_calls"):
            content = write_calls(content, calls, self.calls_tag, self.mark, f"messages[{turn['index']}].tool_calls")
        return f"{reasoning}{content}{self.eos}"

    def unknown_role(self, role: str, i: int) -> InputError:
        return InputError.at(
            f"messages[{i}].role",
            f"{role!r:.40} is unknown to {self.model}; use system, developer, user, assistant or tool",
        )


def thinks(kwargs: Mapping[str, Any] | None) -> bool:
    """Whether the template arguments `thinking` or `enable_thinking` switch the thinking on."""
    options = kwargs or {}
    return bool(options.get("thinking", options.get("enable_thinking")))


def prepare_turn(messages: Sequence[Mapping[str, Any]], i: int) -> dict[str, Any]:
    """Message i. OpenAI's "developer" role has instructions and is followed by a prompt: it becomes system text. The
    vendor's role is a user turn."""
    message = messages[i]
    if message.get("role") == "developer" and i + 1 < len(messages) and messages[i + 1].get("role") in _PROMPTS:
        message = {**message, "role": "system"}
    return prepare_message(message, keep_parts=False) | {"index": i}


def last_user(turns: Sequence[Mapping[str, Any]], system_asks: bool = False) -> int:
    """The last turn of the user or developer (`system_asks`: or of the system, after the first turn); -1: none."""
    asks = lambda i, role: role in ("user", "developer") or (system_asks and i and role == "system")  # noqa: E731
    return max((i for i, turn in enumerate(turns) if asks(i, turn["role"])), default=-1)


def explain_tools(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """`text` with schemas and marks instead of its placeholders."""
    for placeholder, marker in _PLACEHOLDERS.items():
        text = text.replace(placeholder, marker)
    schemas = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return text.replace(SCHEMAS, "\n".join(schemas))


def write_calls(content: str, calls: Sequence[Mapping[str, Any]], block: str, mark: str, place: str) -> str:
    """An answer's content and its tool calls.

    Args:
        block: name of the tag around all calls.
        mark: before the names of tags.
        place: of the calls in the request, for errors.

    Raises:
        InputError: arguments that are no object.
    """
    # the parser leaves the empty line before a block in the content, which clients send back
    content = content.removesuffix("\n\n")
    written = "\n".join(_call(call, mark, f"{place}[{j}]") for j, call in enumerate(calls))
    return f"{content}\n\n<{mark}{block}>\n{written}\n</{mark}{block}>"


def _call(call: Mapping[str, Any], mark: str, place: str) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        where = f"{place}.function.arguments"
        raise InputError.at(where, "must be a JSON object")
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        kind = "true" if is_text else "false"
        lines.append(f'<{mark}parameter name="{key}" string="{kind}">{text}</{mark}parameter>')
    parameters = "\n".join(lines)
    return f'<{mark}invoke name="{function["name"]}">\n{parameters}\n</{mark}invoke>'


def vendor_texts(folder: Path | None, name: Path, tools_name: str, model: str) -> dict[str, Any] | None:
    """Literal values that the vendor's encoder `name` in a checkpoint's folder assigns, by name. The file is not run.
    None, with a warning: the folder has no such file.

    Raises:
        ConfigError: it cannot be read, or `tools_name` is no text with a place for schemas.
    """
    file = None if folder is None else folder / name
    if file is None or not file.is_file():
        logger.warning(
            "%s messages: the checkpoint has no %s, tools and effort are explained in other words than in training",
            model,
            name.as_posix(),
        )
        return None
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ConfigError(f"{file}: cannot be read as Python source: {exc}; give --chat-template") from None
    found: dict[str, Any] = {}
    for statement in body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):  # other than a literal
            value = ast.literal_eval(statement.value)
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    if not isinstance(text := found.get(tools_name), str) or SCHEMAS not in text:
        raise ConfigError(f"{file}: has no text {tools_name} with {SCHEMAS}; give --chat-template")
    return found
