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

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

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

_ENCODER_FILE = Path("encoding", "encoding_dsv4.py")
_TOOLS_NAME = "TOOLS_TEMPLATE"
_EFFORTS_NAME, _FIRST_EFFORT_NAME = "REASONING_EFFORT_PROMPTS", "REASONING_EFFORT_MAX"
"""Texts of all efforts, by effort; the first release has one text, of the effort max."""
_SYNONYMS = {"xhigh": "max"}
# for folders without the vendor's file: the same facts in other words
_OWN_TOOLS_TEXT = """## Tools

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
class DeepseekV4Chat:
    """
    Args:
        tools_text: the text that explains the tools, with the placeholders `{tool_schemas}` and of the markers.
        efforts: texts at the beginning of the prompt in thinking mode, by reasoning effort.
    """

    tools_text: str = _OWN_TOOLS_TEXT
    efforts: Mapping[str, str] = field(default_factory=lambda: _OWN_EFFORTS)
    bos: str = BOS
    eos: str = EOS
    reads_parts = False
    parsers: ClassVar[tuple[str, str]] = ("deepseek-v4", "deepseekv4")
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
            kwargs: `thinking` (or `enable_thinking`): the answer begins inside the reasoning. `reasoning_effort`: one
            of `efforts`; others have no text. Other arguments have no effect.

        Raises:
            InputError: an unknown role, arguments that are no object.
        """
        refuse_reserved(kwargs)
        thinking, keeps_reasoning = thinks(kwargs), bool(tools)
        turns = _turns(messages)
        last_user = _last_user(turns)
        if thinking and not keeps_reasoning:
            turns = [turn for i, turn in enumerate(turns) if turn["role"] != "developer" or i >= last_user]
            last_user = _last_user(turns)
        described = f"\n\n{explain_tools(self.tools_text, tools)}" if tools else ""
        out = [self.bos, self._effort(kwargs) if thinking else ""]
        if described and (not turns or turns[0]["role"] != "system"):
            out.append(described)
        for i, turn in enumerate(turns):
            if turn["role"] == "system":
                out.append(turn["content"] + (described if i == 0 else ""))
            elif turn["role"] == "assistant":
                out.append(self._answer(turn, thinking and (keeps_reasoning or i > last_user)))
            else:
                out.append(f"{USER}{_joined(turn['parts'])}")
                opens = turns[i + 1]["role"] == "assistant" if i + 1 < len(turns) else add_generation_prompt
                tag = THINK_START if thinking and (keeps_reasoning or i >= last_user) else THINK_END
                out.append(f"{ASSISTANT}{tag}" * opens)
        return "".join(out)

    def begun(self, message: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None) -> str:
        return begun_answer(message, kwargs)

    def _effort(self, kwargs: Mapping[str, Any] | None) -> str:
        effort = str((kwargs or {}).get("reasoning_effort"))
        return self.efforts.get(_SYNONYMS.get(effort, effort), "")

    def _answer(self, turn: Mapping[str, Any], with_reasoning: bool) -> str:
        reasoning = f"{turn.get('reasoning_content') or ''}{THINK_END}" if with_reasoning else ""
        content = turn.get("content") or ""
        if calls := turn.get("tool_calls"):
            content = write_calls(content, calls, "tool_calls", f"messages[{turn['index']}].tool_calls")
        return f"{reasoning}{content}{self.eos}"


def load_deepseek_v4(folder: Path | None, special_tokens: Mapping[str, str]) -> DeepseekV4Chat:
    """The encoder for a checkpoint's folder, with the vendor's texts if the folder has them.

    Raises:
        ConfigError: the vendor's file cannot be read.
    """
    marks = special_tokens.get("bos_token", BOS), special_tokens.get("eos_token", EOS)
    file = None if folder is None else folder / _ENCODER_FILE
    if file is None or not file.is_file():
        logger.warning(
            "DeepSeek V4 messages: the checkpoint has no %s, tools and effort are explained in other words than in "
            "training",
            _ENCODER_FILE.as_posix(),
        )
        return DeepseekV4Chat(_OWN_TOOLS_TEXT, _OWN_EFFORTS, *marks)
    texts = vendor_texts(file, _TOOLS_NAME)
    efforts = texts.get(_EFFORTS_NAME)
    if not isinstance(efforts, dict):
        efforts = {"max": texts.get(_FIRST_EFFORT_NAME)}
    efforts = {effort: text for effort, text in efforts.items() if isinstance(text, str)}
    return DeepseekV4Chat(texts[_TOOLS_NAME], efforts, *marks)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of a user turn as one, with their `index` in the request. The `parts` of a user turn are
    texts of the user, at place -1, and results at the place of their call among its answer's calls."""
    turns = list[dict[str, Any]]()
    places = dict[str, int]()
    for i in range(len(messages)):
        turn = prepare_turn(messages, i) | {"index": i}
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
            raise unknown_role("DeepSeek V4", role, i)
    return turns


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    """The text of a user turn, with the results in the order of the calls."""
    results = iter(sorted((part for part in parts if part[0] >= 0), key=itemgetter(0)))
    return "\n\n".join(text if place < 0 else f"<tool_result>{next(results)[1]}</tool_result>" for place, text in parts)


def _last_user(turns: Sequence[Mapping[str, Any]]) -> int:
    return max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)
