"""Harmony, the output format of gpt-oss: messages with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The first message has no `<|start|>assistant`, which is in the prompt; the recipient may also precede the channel.
Source: OpenAI's harmony format guide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_engine.tokenizer.stop import Beginnings, overlap, without_cut_mark

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""Markers that end a message; the last two begin the next message, without an end marker before."""

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ADDRESSED = " to="


@dataclass(frozen=True)
class Header:
    """Header of a message: its channel, and its recipient, empty if it is for the user."""

    channel: str
    recipient: str

    @classmethod
    def parse(cls, text: str) -> Header:
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        return cls(channel[1] if channel else "", recipient[1] if recipient else "")

    @property
    def function(self) -> str:
        """The function that the message calls; empty for other messages."""
        return self.recipient.removeprefix("functions.") if self.channel != "analysis" else ""


class HarmonyReasoning:
    """Used like `ReasoningParser`: messages of the channel `analysis` are reasoning, others content.

    Calls stay in the content unchanged, for the tool-call parser. Messages of one kind are separated by a
    line end. Text outside messages is content. Results do not depend on the pieces.
    """

    def __init__(self, *, stream_reasoning: bool = True) -> None:
        self._stream_reasoning = stream_reasoning
        self._held = ""
        self._state = "begin"
        self._kind = ""
        self._seen: set[str] = set()
        self._gathered = ""
        self._out = {"reasoning": "", "content": ""}
        self._ended = False

    def push(self, text: str) -> tuple[str, str]:
        """Adds text; returns the new reasoning and the new content."""
        self._held += text
        while self._step():
            pass
        return self._take()

    def finish(self, beginnings: Beginnings | None = None) -> tuple[str, str]:
        """Text held back; call after the last text. `beginnings`: as of `without_cut_mark`."""
        self._ended = True
        self._held = without_cut_mark(self._held, ENDS, beginnings)
        while self._step():
            pass
        self._stream_reasoning = True
        return self._take()

    def _take(self) -> tuple[str, str]:
        found, self._out = self._out, {"reasoning": "", "content": ""}
        reasoning, content = self._gathered + found["reasoning"], found["content"]
        waits = not self._stream_reasoning and not content
        self._gathered = reasoning if waits else ""
        return "" if waits else reasoning, content

    def _step(self) -> bool:
        """Handles the part of the held text that is decided; False: more text is needed."""
        if self._state == "begin":
            starts = (CHANNEL, START, _ADDRESSED)
            if any(mark.startswith(self._held) for mark in starts) and not self._ended:
                return False
            self._state = "header" if self._held.startswith(starts) else "between"
            return True
        if self._state == "header":
            return self._header()
        return self._body((START, CHANNEL) if self._state == "between" else ENDS)

    def _header(self) -> bool:
        at = self._held.find(MESSAGE)
        if at < 0:
            if self._ended and self._held:  # a truncated header is not text
                self._held = ""
            return False
        written, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        header = Header.parse(written)
        self._kind = "call" if header.function else "reasoning" if header.channel == "analysis" else "content"
        self._state = "body"
        if self._kind == "call":
            self._add("content", written + MESSAGE)
        elif self._kind in self._seen:
            self._add(self._kind, "\n")
        self._seen.add(self._kind)
        return True

    def _body(self, ends: tuple[str, ...]) -> bool:
        places = [(place, mark) for mark in ends if (place := self._held.find(mark)) >= 0]
        kind = "content" if self._state == "between" or self._kind == "call" else self._kind
        if not places:
            kept = 0 if self._ended else max(overlap(self._held, mark) for mark in ends)
            self._add(kind, self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        place, mark = min(places)
        self._add(kind, self._held[:place])
        begins = mark in (START, CHANNEL)
        if self._kind == "call" and self._state == "body":
            self._add("content", CALL if begins else mark)
        self._held = self._held[place if begins else place + len(mark) :]
        self._state = "header" if begins else "between"
        return True

    def _add(self, kind: str, text: str) -> None:
        self._out[kind] += text
