"""Tool-call parsers for DeepSeek's formats, for whole texts and streams (`--tool-call-parser`).

Wire formats (the bar is U+FF5C, the blank U+2581):

- deepseekv3: ``<CALLS><CALL>function<SEP>NAME\\n```json\\n{args}\\n```<END>`` ``</CALLS>``; newline between calls
- deepseekv31: ``<CALLS><CALL>NAME<SEP>{args}<END>...</CALLS>``
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.tokenizer.stop import overlap

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_QUOTES = re.compile(r'\\.?|"', re.DOTALL)
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


@dataclass(frozen=True)
class ToolFormat:
    """Text around a call's name and arguments, between its markers."""

    before_name: str
    after_name: str
    after_arguments: str
    between_calls: str = ""

    def before_arguments(self, name: str) -> str:
        return f"{CALL_BEGIN}{self.before_name}{name}{self.after_name}"


TOOL_FORMATS = {
    "deepseekv3": ToolFormat(f"function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}", between_calls="\n"),
    "deepseekv31": ToolFormat("", SEPARATOR, CALL_END),
}


@dataclass(frozen=True)
class ToolDelta:
    """A piece of one call. The first piece has `id` and `name`; later ones only further `arguments`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class JsonStrings:
    """Follows a JSON text. `inside`: its end is within a string."""

    def __init__(self) -> None:
        self.inside = False
        self._escaped = False

    def push(self, text: str) -> None:
        if self._escaped and text:
            text, self._escaped = text[1:], False
        for mark in _QUOTES.finditer(text):
            if mark[0] == '"':
                self.inside = not self.inside
            elif mark[0] == "\\":  # the escaped character follows
                self._escaped = True


class ToolCallParser:
    """State machine over the markers: text, between calls, name, arguments.

    Calls of functions that were not offered are dropped, as in SGLang; so is all text after the calls.

    Args:
        form: a key of `TOOL_FORMATS`.
        names: the offered functions; None accepts any.
        parallel: False keeps the first call only.
        is_json: the arguments of calls are JSON (a grammar enforces it): markers in their strings are text.
        content_is_json: so is the text, if there is any.
    """

    def __init__(
        self,
        form: str,
        names: Collection[str] | None = None,
        *,
        parallel: bool = True,
        is_json: bool = False,
        content_is_json: bool = False,
    ) -> None:
        if form not in TOOL_FORMATS:
            raise ConfigError(f"--tool-call-parser {form}: not available yet; choose {' or '.join(TOOL_FORMATS)}")
        self._format = TOOL_FORMATS[form]
        self._names = names
        self._parallel = parallel
        self._is_json = is_json
        self._strings = JsonStrings() if content_is_json else None
        self._held = ""
        self._state = "text"
        self._current: int | None = None
        self.num_calls = 0

    @property
    def cut(self) -> bool:
        """A call of JSON arguments has begun and not ended."""
        return self._is_json and self._state in ("name", "arguments")

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Adds text; returns the new plain text and the new pieces of calls."""
        self._held += text
        shown: list[str] = []
        deltas: list[ToolDelta] = []
        while self._step(shown, deltas):
            pass
        return "".join(shown), deltas

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """Text held back; call after the last text. A truncated call keeps the arguments received so far."""
        held, self._held = self._held, ""
        if self._state == "text":
            return held, []
        if self._state == "arguments" and held and self._current is not None:
            return "", [ToolDelta(self._current, arguments=held)]
        return "", []

    def _step(self, shown: list[str], deltas: list[ToolDelta]) -> bool:
        """One transition; False when more text is needed."""
        if self._state == "text":
            found = self._take_until(CALLS_BEGIN, shown)
            self._state = "between" if found else "text"
            return found
        if self._state == "between":
            if (at := self._held.find(CALL_BEGIN)) >= 0:
                self._held, self._state = self._held[at + len(CALL_BEGIN) :], "name"
                return True
            if CALLS_END in self._held:
                self._held, self._state = "", "done"
            return False
        if self._state == "name":
            if (at := self._held.find(self._format.after_name)) < 0:
                return False
            name = self._held[:at].removeprefix(self._format.before_name).strip()
            self._held, self._state = self._held[at + len(self._format.after_name) :], "arguments"
            self._strings = JsonStrings() if self._is_json else None
            self._open(name, deltas)
            return True
        if self._state == "arguments":
            pieces: list[str] = []
            found = self._take_until(self._format.after_arguments, pieces)
            if self._current is not None and pieces and pieces[0]:
                deltas.append(ToolDelta(self._current, arguments=pieces[0]))
            self._state = "between" if found else "arguments"
            return found
        self._held = ""
        return False

    def _open(self, name: str, deltas: list[ToolDelta]) -> None:
        wanted = (self._names is None or name in self._names) and (self._parallel or self.num_calls == 0)
        self._current = self.num_calls if wanted else None
        if wanted:
            deltas.append(ToolDelta(self.num_calls, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
            self.num_calls += 1

    def _take_until(self, marker: str, out: list[str]) -> bool:
        taken = ""
        while (at := self._held.find(marker)) >= 0:
            if not self._passes(self._held[:at]):
                out.append(taken + self._held[:at])
                self._held = self._held[at + len(marker) :]
                return True
            self._passes(marker[0])
            taken, self._held = taken + self._held[: at + 1], self._held[at + 1 :]
        end = len(self._held) - overlap(self._held, marker)
        self._passes(self._held[:end])
        out.append(taken + self._held[:end])
        self._held = self._held[end:]
        return False

    def _passes(self, text: str) -> bool:
        """Passes over text; returns whether a string of JSON continues behind it."""
        if self._strings is None:
            return False
        self._strings.push(text)
        return self._strings.inside
