"""Splits a model's thinking from its answer, in whole texts and in streams alike (SGLang's `--reasoning-parser`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_engine.tokenizer.stop import overlap

THINK_START = "<think>"
THINK_END = "</think>"

REASONING_PARSERS = ("deepseek-r1", "deepseek-v3")


class ReasoningParser:
    """Text up to `</think>` is reasoning, the rest is content.

    A leading `<think>` is dropped. Both parts lose leading white space, reasoning its trailing white space too. Without
    an end tag everything is reasoning. In a stream, whatever could become a tag is held back.

    Args:
        inside: whether the answer starts inside the reasoning (the prompt ended with an opened `<think>`).
        stream_reasoning: False gathers the reasoning until it is whole.
    """

    def __init__(self, *, inside: bool, stream_reasoning: bool = True) -> None:
        self._inside = inside
        self._stream_reasoning = stream_reasoning
        self._state = "start"
        self._held = ""
        self._gathered: list[str] = []

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece; returns the new reasoning and the new content."""
        self._held += text
        if self._state == "start":
            self._start()
        reasoning = self._reason() if self._state == "reasoning" else ""
        content = ""
        if self._state == "gap":  # white space between the tag and the answer
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content":
            content, self._held = self._held, ""
        return self._gather(reasoning), content

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        self._stream_reasoning = True
        if self._state == "reasoning" or (self._state == "start" and self._inside):
            return self._gather(held.strip() if self._state == "start" else held.rstrip()), ""
        return self._gather(""), held if self._state == "start" else ""

    def _start(self) -> None:
        text = self._held.lstrip()
        if not text or (len(text) < len(THINK_START) and THINK_START.startswith(text)):
            return
        if text.startswith(THINK_START):
            self._held = text = text[len(THINK_START) :].lstrip()
            self._inside = True
            if not text:
                return
        if self._inside:
            self._held, self._state = text, "reasoning"
        else:
            self._state = "content"

    def _reason(self) -> str:
        at = self._held.find(THINK_END)
        if at >= 0:
            reasoning = self._held[:at].rstrip()
            self._held, self._state = self._held[at + len(THINK_END) :], "gap"
            self._stream_reasoning = True
            return reasoning
        safe = self._held[: len(self._held) - overlap(self._held, THINK_END)].rstrip()
        self._held = self._held[len(safe) :]
        return safe

    def _gather(self, reasoning: str) -> str:
        if self._stream_reasoning:
            if self._gathered:
                reasoning = "".join(self._gathered) + reasoning
                self._gathered.clear()
            return reasoning
        if reasoning:
            self._gathered.append(reasoning)
        return ""


def starts_inside(parser: str, prompt: str, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether the answer to a rendered prompt begins inside the reasoning."""
    if prompt.rstrip().endswith(THINK_START):
        return True
    if parser == "deepseek-v3":
        return bool(template_kwargs.get("thinking")) and not prompt.rstrip().endswith(THINK_END)
    return True
