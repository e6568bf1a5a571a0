"""Prompts of DeepSeek V3.2, whose checkpoints have no Jinja template: the layout of the vendor's message encoder.

A user turn opens the answer: `<｜User｜>`text`<｜Assistant｜>`, then `<think>` in thinking mode, if it is the last user
turn, else `</think>`. EOS follows a complete answer. Tools follow the system text. Calls are DSML, a tag for each
argument. All results of a message's calls are one block, which opens the answer like a user turn. Reasoning is written
in thinking mode only, for answers after the last user turn.

Source: `encoding/encoding_dsv32.py` in the checkpoint of DeepSeek V3.2, for the layout; the text that explains the
tools is read from that file (as a literal, the file is not run).
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError, InputError
from moe_engine.tokenizer.chat_messages import prepare_message, refuse_reserved
from moe_engine.tokenizer.reasoning import THINK_END, THINK_START
from moe_engine.tokenizer.tool_calls.tagged import DSML

logger = logging.getLogger("moe_engine")

MODEL_TYPE = "deepseek_v32"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
DEVELOPER = "# The user's message is: "
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_ENCODER_FILE = Path("encoding", "encoding_dsv32.py")
_TOOLS_NAME = "TOOLS_SYSTEM_TEMPLATE"
_SCHEMAS = "{tool_schemas}"
_PLACEHOLDERS = {"{dsml_token}": DSML, "{thinking_start_token}": THINK_START, "{thinking_end_token}": THINK_END}
# for folders without the vendor's file: the same facts in other words
_OWN_TOOLS_TEXT = """## Tools

These functions can be called. A call is written in this form, several calls stand in one block:
<{dsml_token}function_calls>
<{dsml_token}invoke name="$FUNCTION_NAME">
<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}function_calls>
A value of type string is plain text, with string="true". Any other value is JSON, with string="false".
Results follow in <function_results>.

JSON schemas of the functions:
<functions>
{tool_schemas}
</functions>
"""
_PROMPTS = ("system", "developer", "user")


@dataclass(frozen=True)
class DeepseekV32Chat:
    """
    Args:
        tools_text: the text that explains the tools, with the placeholders `{tool_schemas}` and of the markers.
    """

    tools_text: str = _OWN_TOOLS_TEXT
    bos: str = _BOS
    eos: str = _EOS
    reads_parts = False

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
            kwargs: `thinking` (or `enable_thinking`): the answer begins inside the reasoning. Other arguments have no
            effect.

        Raises:
            InputError: an unknown role, a result without a call, arguments that are no object.
        """
        refuse_reserved(kwargs)
        thinking = _thinks(kwargs)
        turns = [prepare_message(_own_role(messages, i), keep_parts=False) for i in range(len(messages))]
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)
        out = [self.bos]
        described = f"\n\n{self._tools(tools)}" if tools else ""
        if described and (not turns or turns[0]["role"] != "system"):
            out.append(described)
        first_result = 0
        for i, turn in enumerate(turns):
            role = turn["role"]
            first_result = first_result if role == "tool" else i + 1
            tag = THINK_START if thinking and i >= last_user else THINK_END
            if role == "system":
                out.append(turn["content"] + (described if i == 0 else ""))
                continue
            if role == "assistant":
                out.append(self._answer(turn, i, thinking and i > last_user))
                continue
            if role == "tool":
                text, opening = _result(turns, first_result, i), f"\n\n{tag}"
            elif role in ("user", "developer"):
                before = f"\n\n{DEVELOPER}" if role == "developer" else ""
                text, opening = f"{USER}{before}{turn['content']}", f"{ASSISTANT}{tag}"
            else:
                raise InputError(
                    f"messages[{i}].role: {role!r:.40} is unknown to DeepSeek V3.2; use system, developer, user, "
                    "assistant or tool",
                    field=f"messages[{i}].role",
                )
            out.append(text)
            more_results = role == "tool" and i + 1 < len(turns) and turns[i + 1]["role"] == "tool"
            if not more_results and (add_generation_prompt or i + 1 < len(turns)):
                out.append(opening)
        return "".join(out)

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        """In thinking mode the reasoning and its end come first. Without content the reasoning continues."""
        content: str = message["content"]
        reasoning = message.get("reasoning_content") or ""
        if not _thinks(kwargs):
            return content
        return f"{reasoning}{THINK_END}{content}" if content else reasoning

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        text = self.tools_text
        for placeholder, marker in _PLACEHOLDERS.items():
            text = text.replace(placeholder, marker)
        schemas = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        return text.replace(_SCHEMAS, "\n".join(schemas))

    def _answer(self, turn: Mapping[str, Any], i: int, with_reasoning: bool) -> str:
        reasoning = f"{turn.get('reasoning_content') or ''}{THINK_END}" if with_reasoning else ""
        content, calls = turn.get("content") or "", turn.get("tool_calls")
        if not calls:
            return f"{reasoning}{content}{self.eos}"
        # the parser leaves the empty line before a block in the content, which clients send back
        content = content.removesuffix("\n\n")
        block = "\n".join(_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls))
        return f"{reasoning}{content}\n\n<{DSML}function_calls>\n{block}\n</{DSML}function_calls>{self.eos}"


def _thinks(kwargs: Mapping[str, Any] | None) -> bool:
    options = kwargs or {}
    return bool(options.get("thinking", options.get("enable_thinking")))


def load_deepseek_v32(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV32Chat:
    """The encoder for a checkpoint's folder, with the vendor's explanation of tools if the folder has it.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    marks = special_tokens.get("bos_token", _BOS), special_tokens.get("eos_token", _EOS)
    file = None if folder is None else folder / _ENCODER_FILE
    if file is not None and file.is_file():
        return DeepseekV32Chat(_vendor_text(file), *marks)
    logger.warning(
        "DeepSeek V3.2 messages: the checkpoint has no %s, tools are explained in other words than in training",
        _ENCODER_FILE.as_posix(),
    )
    return DeepseekV32Chat(_OWN_TOOLS_TEXT, *marks)


def is_deepseek_v32(folder: Path) -> bool:
    """Decided by `model_type` of config.json. A file that cannot be read is refused when the model is loaded."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def _vendor_text(file: Path) -> str:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ConfigError(f"{file}: cannot be read as Python source: {exc}; give --chat-template") from None
    for statement in body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        value = statement.value
        named = any(isinstance(target, ast.Name) and target.id == _TOOLS_NAME for target in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str) and _SCHEMAS in value.value:
            return value.value
    raise ConfigError(f"{file}: has no text {_TOOLS_NAME} with {_SCHEMAS}; give --chat-template")


def _own_role(messages: Sequence[Mapping[str, Any]], i: int) -> Mapping[str, Any]:
    """OpenAI's "developer" role has instructions and is followed by a prompt: it becomes system text. The vendor's role
    is a user turn."""
    message = messages[i]
    if message.get("role") == "developer" and i + 1 < len(messages) and messages[i + 1].get("role") in _PROMPTS:
        return {**message, "role": "system"}
    return message


def _result(turns: Sequence[Mapping[str, Any]], first: int, i: int) -> str:
    """The result in turn i. `first`: the turn of the first result of the same calls."""
    calls = turns[first - 1].get("tool_calls") if first else None
    if not calls or i - first >= len(calls):
        raise InputError(
            f"messages[{i}]: a tool result without a tool call of the assistant's message before it",
            field=f"messages[{i}]",
        )
    begin = "\n\n<function_results>" if i == first else ""
    ends = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
    return f"{begin}\n<result>{turns[i]['content']}</result>" + ("\n</function_results>" if ends else "")


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
