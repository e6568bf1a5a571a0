"""Prompts of DeepSeek V3.2, whose checkpoints have no Jinja template: the layout of the vendor's message encoder.

A user turn opens the answer: `<｜User｜>`text`<｜Assistant｜>`, then `<think>` in thinking mode, if it is the last user
turn, else `</think>`. EOS follows a complete answer. Tools follow the system text. Calls are DSML, a tag for each
argument. All results of a message's calls are one block, which opens the answer like a user turn. Reasoning is written
in thinking mode only, for answers after the last user turn.

Source: `encoding/encoding_dsv32.py` in the checkpoint of DeepSeek V3.2, for the layout; the text that explains the
tools is read from that file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_engine.errors import InputError
from moe_engine.tokenizer.chat_messages import refuse_reserved
from moe_engine.tokenizer.deepseek_messages import (
    ASSISTANT,
    BOS,
    EOS,
    USER,
    begun_answer,
    explain_tools,
    prepare_turn,
    thinks,
    unknown_role,
    vendor_texts,
    write_calls,
)
from moe_engine.tokenizer.reasoning import THINK_END, THINK_START

logger = logging.getLogger("moe_engine")

DEVELOPER = "# The user's message is: "
_ENCODER_FILE = Path("encoding", "encoding_dsv32.py")
_TOOLS_NAME = "TOOLS_SYSTEM_TEMPLATE"
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


@dataclass(frozen=True)
class DeepseekV32Chat:
    """
    Args:
        tools_text: the text that explains the tools, with the placeholders `{tool_schemas}` and of the markers.
    """

    tools_text: str = _OWN_TOOLS_TEXT
    bos: str = BOS
    eos: str = EOS
    reads_parts = False
    parsers: ClassVar[tuple[str, str]] = ("deepseek-v3", "deepseekv32")
    """Of the reasoning and of the tool calls in answers."""

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
        thinking = thinks(kwargs)
        turns = [prepare_turn(messages, i) for i in range(len(messages))]
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)
        out = [self.bos]
        described = f"\n\n{explain_tools(self.tools_text, tools)}" if tools else ""
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
                raise unknown_role("DeepSeek V3.2", role, i)
            out.append(text)
            more_results = role == "tool" and i + 1 < len(turns) and turns[i + 1]["role"] == "tool"
            if not more_results and (add_generation_prompt or i + 1 < len(turns)):
                out.append(opening)
        return "".join(out)

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        return begun_answer(message, kwargs)

    def _answer(self, turn: Mapping[str, Any], i: int, with_reasoning: bool) -> str:
        reasoning = f"{turn.get('reasoning_content') or ''}{THINK_END}" if with_reasoning else ""
        content = turn.get("content") or ""
        if calls := turn.get("tool_calls"):
            content = write_calls(content, calls, "function_calls", f"messages[{i}].tool_calls")
        return f"{reasoning}{content}{self.eos}"


def load_deepseek_v32(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV32Chat:
    """The encoder for a checkpoint's folder, with the vendor's explanation of tools if the folder has it.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    marks = special_tokens.get("bos_token", BOS), special_tokens.get("eos_token", EOS)
    file = None if folder is None else folder / _ENCODER_FILE
    if file is not None and file.is_file():
        return DeepseekV32Chat(vendor_texts(file, _TOOLS_NAME)[_TOOLS_NAME], *marks)
    logger.warning(
        "DeepSeek V3.2 messages: the checkpoint has no %s, tools are explained in other words than in training",
        _ENCODER_FILE.as_posix(),
    )
    return DeepseekV32Chat(_OWN_TOOLS_TEXT, *marks)


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
