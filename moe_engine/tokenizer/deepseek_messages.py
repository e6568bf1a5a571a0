"""Common parts of the message encoders of DeepSeek V3.2 and V4, whose checkpoints have no Jinja template but an encoder
in Python: marks, thinking, tool calls (DSML), and the vendor's texts, which are read from that encoder's file."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer.chat_messages import prepare_message
from moe_engine.tokenizer.reasoning import THINK_END, THINK_START
from moe_engine.tokenizer.tool_calls.tagged import DSML

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SCHEMAS = "{tool_schemas}"
_PLACEHOLDERS = {"{dsml_token}": DSML, "{thinking_start_token}": THINK_START, "{thinking_end_token}": THINK_END}
_PROMPTS = ("system", "developer", "user")


def thinks(kwargs: Mapping[str, Any] | None) -> bool:
    """Whether the template arguments `thinking` or `enable_thinking` switch the thinking on."""
    options = kwargs or {}
    return bool(options.get("thinking", options.get("enable_thinking")))


def begun_answer(message: Mapping[str, Any], kwargs: Mapping[str, Any] | None) -> str:
    """In thinking mode the reasoning and its end come first. Without content the reasoning continues."""
    content: str = message["content"]
    reasoning = message.get("reasoning_content") or ""
    if not thinks(kwargs):
        return content
    return f"{reasoning}{THINK_END}{content}" if content else reasoning


def prepare_turn(messages: Sequence[Mapping[str, Any]], i: int) -> dict[str, Any]:
    """Message i. OpenAI's "developer" role has instructions and is followed by a prompt: it becomes system text. The
    vendor's role is a user turn."""
    message = messages[i]
    if message.get("role") == "developer" and i + 1 < len(messages) and messages[i + 1].get("role") in _PROMPTS:
        message = {**message, "role": "system"}
    return prepare_message(message, keep_parts=False)


def unknown_role(model: str, role: str, i: int) -> InputError:
    return InputError(
        f"messages[{i}].role: {role!r:.40} is unknown to {model}; use system, developer, user, assistant or tool",
        field=f"messages[{i}].role",
    )


def explain_tools(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """`text` with schemas and marks in the place of its placeholders."""
    for placeholder, marker in _PLACEHOLDERS.items():
        text = text.replace(placeholder, marker)
    schemas = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return text.replace(SCHEMAS, "\n".join(schemas))


def write_calls(content: str, calls: Sequence[Mapping[str, Any]], block: str, place: str) -> str:
    """An answer's content and its tool calls.

    Args:
        block: name of the tag around all calls.
        place: of the calls in the request, for errors.

    Raises:
        InputError: arguments that are no object.
    """
    # the parser leaves the empty line before a block in the content, which clients send back
    content = content.removesuffix("\n\n")
    written = "\n".join(_call(call, f"{place}[{j}]") for j, call in enumerate(calls))
    return f"{content}\n\n<{DSML}{block}>\n{written}\n</{DSML}{block}>"


def _call(call: Mapping[str, Any], place: str) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        where = f"{place}.function.arguments"
        raise InputError(f"{where}: must be a JSON object", field=where)
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        kind = "true" if is_text else "false"
        lines.append(f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>')
    parameters = "\n".join(lines)
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>'


def vendor_texts(file: Path, tools_name: str) -> dict[str, Any]:
    """Literal values that the vendor's encoder assigns, by name. The file is not run.

    Raises:
        ConfigError: it cannot be read, or `tools_name` is no text with a place for schemas.
    """
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
