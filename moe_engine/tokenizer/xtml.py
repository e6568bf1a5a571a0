"""XTML, the message format of Kimi K3: an answer has the channels `think`, `response` and `tools`, each between tags of
several tokens, `<|open|>think<|sep|>` and `<|close|>think<|sep|>`; `<|close|>message<|sep|>` ends it."""

from __future__ import annotations

from moe_engine.tokenizer.stop import Beginnings, overlap, without_cut_mark

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MARKERS = (OPEN, CLOSE, SEP)
"""The special tokens."""


def opened(channel: str) -> str:
    return f"{OPEN}{channel}{SEP}"


def closed(channel: str) -> str:
    return f"{CLOSE}{channel}{SEP}"


THINK, THINK_END, RESPONSE, TOOLS = opened("think"), closed("think"), opened("response"), opened("tools")
_CHANNELS = {THINK: "think", RESPONSE: "response", TOOLS: "tools"}
_TAGS = (*_CHANNELS, THINK_END, closed("response"), closed("tools"), closed("message"))


class XtmlReasoning:
    """Used like `ReasoningParser`: the channel `think` is reasoning, other text content.

    Calls stay in the content with the tags of their channel, for the tool-call parser; other tags are removed. Results
    do not depend on the pieces.

    Args:
        inside: whether the output starts inside the reasoning.
    """

    def __init__(self, *, inside: bool, stream_reasoning: bool = True) -> None:
        self._channel = "think" if inside else ""
        self._stream_reasoning = stream_reasoning
        self._held = self._gathered = ""

    def push(self, text: str) -> tuple[str, str]:
        """Adds text; returns the new reasoning and the new content."""
        self._held += text
        return self._read(whole=False)

    def finish(self, beginnings: Beginnings | None = None) -> tuple[str, str]:
        """Text held back; call after the last text. `beginnings`: as of `without_cut_mark`."""
        self._held = without_cut_mark(self._held, _TAGS, beginnings)
        self._stream_reasoning = True
        return self._read(whole=True)

    def _read(self, whole: bool) -> tuple[str, str]:
        parts = {True: self._gathered, False: ""}  # reasoning, content
        while found := [(at, tag) for tag in _TAGS if (at := self._held.find(tag)) >= 0]:
            at, tag = min(found)
            parts[self._channel == "think"] += self._held[:at]
            self._held = self._held[at + len(tag) :]
            self._channel = _CHANNELS.get(tag, "")
            if "tools" in tag:
                parts[False] += tag
        kept = 0 if whole else max(overlap(self._held, tag) for tag in _TAGS)
        ready, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        parts[self._channel == "think"] += ready
        waits = not self._stream_reasoning and self._channel == "think"
        self._gathered = parts[True] if waits else ""
        return "" if waits else parts[True], parts[False]
