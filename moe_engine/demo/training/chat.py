"""Special tokens and the chat layout: a plain-Python equivalent of chat_template.jinja, fast enough for a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUTS_BEGIN, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

SPECIAL_TOKENS: tuple[str, ...] = (
    BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP,
    OUTPUTS_BEGIN, OUTPUTS_END, OUTPUT_BEGIN, OUTPUT_END,
)  # fmt: skip
"""In id order: the first is token 0."""

TEMPLATE_FILE: Path = Path(__file__).with_name("chat_template.jinja")

Message = dict[str, Any]


def tools_text(tools: list[dict[str, Any]]) -> str:
    """The tools section of the system text."""
    parts = ["## Tools\nYou may call these functions:"]
    for tool in tools:
        f = tool["function"]
        schema = json.dumps(f["parameters"], ensure_ascii=False)
        parts.append(f"### {f['name']}\nDescription: {f['description']}\n\nParameters: {schema}")
    example = '{"argument": "value"}'
    parts.append(f"To call a function, write {CALLS_BEGIN}{CALL_BEGIN}name{SEP}{example}{CALL_END}{CALLS_END}")
    return "\n\n".join(parts)


def render(messages: list[Message], tools: list[dict[str, Any]] | None = None, thinking: bool = False) -> str:
    """Render a conversation; one that ends with a user turn gets the generation prompt.

    An assistant message may carry `reasoning`: it is kept (as in a generated answer) instead of the empty `</think>`.
    """
    system = [m["content"] for m in messages if m["role"] == "system"]
    if tools:
        system.append(tools_text(tools))
    out = [BOS, "\n\n".join(system)]
    after_user = False
    for m in messages:
        if m["role"] == "user":
            out += [USER, m["content"]]
            after_user = True
        elif m["role"] == "tool":
            out += [OUTPUT_BEGIN, m["content"], OUTPUT_END]
            after_user = False
        elif m["role"] == "assistant":
            if after_user:
                reasoning = m.get("reasoning")
                out += [ASSISTANT, END_THINK if reasoning is None else f"{THINK}{reasoning}{END_THINK}"]
            after_user = False
            out.append(m.get("content") or "")
            if m.get("tool_calls"):
                out.append(CALLS_BEGIN)
                for call in m["tool_calls"]:
                    f = call["function"]
                    out.append(f"{CALL_BEGIN}{f['name']}{SEP}{f['arguments']}{CALL_END}")
                out.append(CALLS_END)
            out.append(EOS)
    if after_user:
        out.append(ASSISTANT + (THINK if thinking else END_THINK))
    return "".join(out)
