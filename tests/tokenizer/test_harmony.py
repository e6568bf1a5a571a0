"""Harmony outputs of gpt-oss: whole texts, the same in pieces, and the parser of calls after it."""

from __future__ import annotations

import pytest

from moe_engine.server.openai.choice import ChoiceParser, ParserOptions
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, free_reasoning, reasoning_parser

ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
CASES = [
    (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Hello < you<|return|>", ("I think.", "Hello < you")),
    ("<|channel|>final<|message|>Hello", ("", "Hello")),
    ("<|channel|>final<|message|>{}<|ret", ("", "{}<|ret")),
    ("<|channel|>analysis<|message|>cut", ("cut", "")),
    ("<|channel|>analy", ("", "")),
    ("no markers at all", ("", "no markers at all")),
    (f"{ANALYSIS}{NEXT}{CALL}", ("I think.", NEXT + CALL)),
    (f"{ANALYSIS}{NEXT}{CALL[:-8]}", ("I think.", NEXT + CALL[:-8])),
    (" to=functions.f<|channel|>commentary<|message|>{}<|call|>",
     ("", " to=functions.f<|channel|>commentary<|message|>{}<|call|>")),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ("", f"I look.{NEXT}{CALL}")),
    (f"{ANALYSIS}{NEXT}<|channel|>analysis<|message|>More.<|end|>{NEXT}<|channel|>final<|message|>x",
     ("I think.\nMore.", "x")),
    ("<|channel|>analysis<|message|>why<|channel|>final<|message|>x", ("why", "x")),
    ("<|channel|>analysis to=python<|message|>print()<|end|>", ("print()", "")),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("text", "wanted"), CASES)
@pytest.mark.parametrize("streamed", [True, False])
def test_reasoning_and_content(text: str, wanted: tuple[str, str], size: int, streamed: bool) -> None:
    parser = reasoning_parser(REASONING_FORMATS["gpt-oss"], inside=False, stream_reasoning=streamed)
    found = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    reasoning, content = ("".join(part) for part in zip(*found))
    assert (reasoning, content) == wanted


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_both_parsers(size: int) -> None:
    text = f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}"
    form = REASONING_FORMATS["gpt-oss"]
    parser = ChoiceParser(ParserOptions(reasoning=form, tool_form="gpt-oss", functions={"f": None}))
    deltas = [d for at in range(0, len(text), size) for d in parser.push(text[at : at + size])] + parser.finish(None)
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think."
    assert "".join(d.get("content") or "" for d in deltas).strip() == "I look."
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"a": 1}'


def test_constrained_text_begins_in_the_final_channel() -> None:
    reasoning = free_reasoning("gpt-oss", "<|start|>assistant", {})
    assert reasoning is not None and reasoning.inside and reasoning.end == "<|channel|>final<|message|>"
