"""Tags around the answer that follow the reasoning: ``<answer>`` of Hunyuan-A13B, ``<response>`` of ERNIE 4.5."""

from __future__ import annotations

from moe_engine.tokenizer.stop import overlap


class AnswerTags:
    """Removes the tags around an answer, and the white space inside of them, from a text in pieces.

    The opening tag counts at the beginning only, the closing tag only before the end of the text or before tool calls;
    other tags are text. A text that does not begin with the opening tag is not changed.

    Args:
        start, end: the tags.
        calls: begin of tool calls; empty: none.
    """

    def __init__(self, start: str, end: str, calls: str) -> None:
        self._start, self._end, self._calls = start, end, calls
        self._held = ""
        self._state = "before"

    def push(self, text: str) -> str:
        """Adds text; returns the new part of the answer."""
        self._held += text
        if self._state == "before":
            found = self._held.lstrip()
            if found.startswith(self._start):
                self._held, self._state = found[len(self._start) :], "opened"
            elif not self._start.startswith(found):
                self._state = "other"
        if self._state == "opened":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "inside"
        if self._state == "inside":
            return self._inside()
        if self._state == "other":
            held, self._held = self._held, ""
            return held
        return ""

    def finish(self) -> str:
        """Text held back; call after the last text."""
        held, self._held = self._held, ""
        _, tag, behind = held.partition(self._end)
        return behind.lstrip() if self._state == "inside" and tag else held

    def _inside(self) -> str:
        out = ""
        while (at := self._held.find(self._end)) >= 0:
            behind = self._held[at + len(self._end) :]
            found = behind.lstrip()
            if self._calls and found.startswith(self._calls):
                out += self._held[:at].rstrip() + found
                self._held, self._state = "", "other"
                return out
            if not found or self._calls.startswith(found):  # may be the last tag
                kept = self._held[:at].rstrip()
                self._held = self._held[len(kept) :]
                return out + kept
            out, self._held = out + self._held[: at + len(self._end)], behind
        safe = self._held[: len(self._held) - overlap(self._held, self._end)].rstrip()
        self._held = self._held[len(safe) :]
        return out + safe
