"""Prompts of DeepSeek V4, whose checkpoints have no Jinja template: the layout of the vendor's message encoder.

Adjacent user messages and tool results are one user turn: `<｜User｜>` and its parts with an empty line between them,
results in `<tool_result>` and in the order of the calls. An answer opens with `<｜Assistant｜>` and `<think>`, without
thinking `</think>`; it ends with EOS. Tools follow the system text. Calls are DSML, a tag for each argument. In
thinking mode a text about the effort comes first. With tools, all answers have their reasoning; without, those after
the last user turn have it, and developer turns before that turn are left out.

Source: `encoding/encoding_dsv4.py` in the checkpoint of DeepSeek V4, for the layout; the texts that explain the tools
and the effort are read from that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

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

_ENCODER_FILE = Path("encoding", "encoding_dsv4.py")
_TOOLS_NAME = "TOOLS_TEMPLATE"
_EFFORTS_NAME, _FIRST_EFFORT_NAME = "REASONING_EFFORT_PROMPTS", "REASONING_EFFORT_MAX"
"""Texts of all efforts, by effort; the first release has one text, of the effort max."""
_SYNONYMS = {"xhigh": "max"}
# for folders without the vendor's file: the same facts in other words
OWN_TOOLS_TEXT = """## Tools

These functions can be called. A call is written in this form, several calls stand in one block:
<{dsml_token}tool_calls>
<{dsml_token}invoke name="$TOOL_NAME">
<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>
A value of type string is plain text, with string="true". Any other value is JSON, with string="false".
Reasoning stands in {thinking_start_token}...{thinking_end_token}, before calls. Results follow in <tool_result>.

JSON schemas of the functions:
{tool_schemas}
"""
_OWN_EFFORTS = {"max": "Reasoning effort: maximum. Check each step, each case and each assumption.\n\n"}


@dataclass(frozen=True)
class DeepseekV4Chat(DeepseekChat):
    """
    Args:
        efforts: texts at the beginning of the prompt in thinking mode, by reasoning effort; the template argument
        `reasoning_effort` names one of them, others have no text.
    """

    tools_text: str = OWN_TOOLS_TEXT
    efforts: Mapping[str, str] = field(default_factory=lambda: _OWN_EFFORTS)
    model = "DeepSeek V4"
    parsers = ("deepseek-v4", "deepseekv4")
    calls_tag = "tool_calls"

    def turns(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool, has_tools: bool
    ) -> tuple[list[dict[str, Any]], int]:
        turns = self._turns(messages)
        if thinking and has_tools:
            return turns, -1
        last = last_user(turns, self.system_asks)
        if thinking:
            turns = [turn for i, turn in enumerate(turns) if turn["role"] != "developer" or i >= last]
        return turns, last_user(turns, self.system_asks)

    def begin(self, turns: Sequence[Mapping[str, Any]], thinking: bool, kwargs: Mapping[str, Any] | None) -> str:
        effort = str((kwargs or {}).get("reasoning_effort"))
        return self.efforts.get(_SYNONYMS.get(effort, effort), "") if thinking else ""

    def prompt(self, turns: Sequence[Mapping[str, Any]], i: int) -> tuple[str, str | None]:
        opens = i + 1 == len(turns) or turns[i + 1]["role"] == "assistant"
        return f"{USER}{_joined(turns[i]['parts'])}", ASSISTANT if opens else None

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, those of a user turn as one. The `parts` of a user turn are texts of the user, at place -1, and
        results at the place of their call among its answer's calls."""
        turns = list[dict[str, Any]]()
        places = dict[str, int]()
        for i in range(len(messages)):
            turn = prepare_turn(messages, i)
            role, content = turn["role"], turn["content"]
            if role in ("user", "tool"):
                if not turns or turns[-1]["role"] != "user":
                    turns.append({"role": "user", "parts": []})
                place = -1 if role == "user" else places.get(turn.get("tool_call_id") or "", 0)
                turns[-1]["parts"].append((place, content))
            elif role in ("system", "developer", "assistant"):
                turns.append(turn | {"parts": [(-1, content)]})
                if calls := turn.get("tool_calls"):
                    places = {call["id"]: place for place, call in enumerate(calls) if call.get("id")}
            else:
                raise self.unknown_role(role, i)
        return turns


def load_deepseek_v4(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV4Chat:
    """The encoder for a checkpoint's folder, with the vendor's texts if the folder has them.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    bos, eos = special_tokens.get("bos_token", BOS), special_tokens.get("eos_token", EOS)
    texts = vendor_texts(folder, _ENCODER_FILE, _TOOLS_NAME, DeepseekV4Chat.model)
    if texts is None:
        return DeepseekV4Chat(bos=bos, eos=eos)
    efforts = texts.get(_EFFORTS_NAME)
    if not isinstance(efforts, dict):
        efforts = {"max": texts.get(_FIRST_EFFORT_NAME)}
    efforts = {effort: text for effort, text in efforts.items() if isinstance(text, str)}
    return DeepseekV4Chat(texts[_TOOLS_NAME], bos, eos, efforts)


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    """The text of a user turn, with the results in the order of the calls."""
    results = iter(sorted((part for part in parts if part[0] >= 0), key=itemgetter(0)))
    return "\n\n".join(text if place < 0 else f"<tool_result>{next(results)[1]}</tool_result>" for place, text in parts)
