"""Tags around the answer that follows the reasoning: ``<answer>`` of Hunyuan-A13B, ``<response>`` of ERNIE 4.5,
``<|begin|>assistant<|content|>`` of Solar Open."""

from __future__ import annotations

from moe_engine.tokenizer.stop import Beginnings, overlap, without_cut_mark


class AnswerTags:
    """Removes the tags around an answer, and the white space inside of them, from a text in pieces.

    The opening tag counts at the beginning only, the closing tag only before the end of the text or before tool calls;
    other tags are text. A text that does not begin with the opening tag is not changed.

    Args:
        start, end: the tags.
        calls: begin of tool calls; empty: none.
        turn: text that may precede the opening tag and tool calls, which is removed too; empty: none.
    """

    def __init__(self, start: str, end: str, calls: str, turn: str = "") -> None:
        self._start, self._end, self._calls, self._turn = start, end, calls, turn
        self._held = ""
        self._state = "before"

    def push(self, text: str) -> str:
        """Adds text; returns the new part of the answer."""
        self._held += text
        if self._state == "before":
            self._before()
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

    def finish(self, beginnings: Beginnings | None = None) -> str:
        """Text held back; call after the last text. `beginnings`: as of `without_cut_mark`."""
        held, self._held = self._held, ""
        _, tag, behind = held.partition(self._end)
        if self._state == "inside" and tag:
            held = self._behind_turn(behind)
        elif self._state == "before" and beginnings is not None:
            held = self._behind_turn(held)
        return without_cut_mark(held, (self._start, self._end, self._calls, self._turn), beginnings)

    def _before(self) -> None:
        found = self._behind_turn(self._held)
        if found.startswith(self._start):
            self._held, self._state = found[len(self._start) :], "opened"
        elif self._turn and self._calls and found.startswith(self._calls):
            self._held, self._state = found, "other"
        elif not self._may_become(found, self._start, self._turn, self._calls if self._turn else ""):
            self._state = "other"

    def _inside(self) -> str:
        out = ""
        while (at := self._held.find(self._end)) >= 0:
            behind = self._held[at + len(self._end) :]
            found = self._behind_turn(behind)
            if self._calls and found.startswith(self._calls):
                out += self._held[:at].rstrip() + found
                self._held, self._state = "", "other"
                return out
            if self._may_become(found, self._turn, self._calls):  # may be the last tag
                kept = self._held[:at].rstrip()
                self._held = self._held[len(kept) :]
                return out + kept
            out, self._held = out + self._held[: at + len(self._end)], behind
        safe = self._held[: len(self._held) - overlap(self._held, self._end)].rstrip()
        self._held = self._held[len(safe) :]
        return out + safe

    def _behind_turn(self, text: str) -> str:
        text = text.lstrip()
        return text[len(self._turn) :].lstrip() if self._turn and text.startswith(self._turn) else text

    @staticmethod
    def _may_become(text: str, *texts: str) -> bool:
        """Whether more text may make one of these of it."""
        return not text or any(one.startswith(text) for one in texts)
