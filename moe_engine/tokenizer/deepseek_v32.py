"""Prompts of DeepSeek V3.2, whose checkpoints have no Jinja template: the layout of the vendor's message encoder.

A user turn opens the answer: `<｜User｜>`text`<｜Assistant｜>`, then `<think>` in thinking mode, if it is the last user
turn, else `</think>`. EOS follows a complete answer. Tools follow the system text. Calls are DSML, a tag for each
argument. All results of a message's calls are one block, which opens the answer like a user turn. Reasoning is written
in thinking mode only, for answers after the last user turn.

Source: `encoding/encoding_dsv32.py` in the checkpoint of DeepSeek V3.2, for the layout; the text that explains the
tools is read from that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import InputError
from moe_engine.tokenizer.deepseek_messages import (
    ASSISTANT,
    BOS,
    EOS,
    USER,
    DeepseekChat,
    last_user,
    prepare_turn,
    vendor_texts,
)

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
class DeepseekV32Chat(DeepseekChat):
    tools_text: str = _OWN_TOOLS_TEXT
    model = "DeepSeek V3.2"
    parsers = ("deepseek-v3", "deepseekv32")
    calls_tag = "function_calls"

    def turns(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool, has_tools: bool
    ) -> tuple[list[dict[str, Any]], int]:
        turns = [prepare_turn(messages, i) for i in range(len(messages))]
        return turns, last_user(turns)

    def prompt(self, turns: Sequence[Mapping[str, Any]], i: int) -> tuple[str, str | None]:
        role = turns[i]["role"]
        if role == "tool":
            ends = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
            return _result(turns, i, ends), "\n\n" if ends else None
        if role not in ("user", "developer"):
            raise self.unknown_role(role, i)
        before = f"\n\n{DEVELOPER}" if role == "developer" else ""
        return f"{USER}{before}{turns[i]['content']}", ASSISTANT


def load_deepseek_v32(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV32Chat:
    """The encoder for a checkpoint's folder, with the vendor's explanation of tools if the folder has it.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    marks = special_tokens.get("bos_token", BOS), special_tokens.get("eos_token", EOS)
    texts = vendor_texts(folder, _ENCODER_FILE, _TOOLS_NAME, DeepseekV32Chat.model)
    return DeepseekV32Chat(_OWN_TOOLS_TEXT if texts is None else texts[_TOOLS_NAME], *marks)


def _result(turns: Sequence[Mapping[str, Any]], i: int, ends: bool) -> str:
    """The result in turn i. `ends`: it is the last one of its calls."""
    first = i
    while first and turns[first - 1]["role"] == "tool":
        first -= 1
    calls = turns[first - 1].get("tool_calls") if first else None
    if not calls or i - first >= len(calls):
        raise InputError.at(f"messages[{i}]", "a tool result without a tool call of the assistant's message before it")
    begin = "\n\n<function_results>" if i == first else ""
    return f"{begin}\n<result>{turns[i]['content']}</result>" + ("\n</function_results>" if ends else "")
