"""Formats that write the function's name before the JSON of its arguments: DeepSeek V3 to V3.1, Kimi K2, Solar Open."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.counted_ids import counted_id

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_ID = re.compile(r"[\w-]{1,64}")
_NUMBERED = re.compile(r":\d+$")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class NamedFormat:
    """Text around calls, names and arguments. `call_end` ends the call even if `after_arguments` is incomplete. The id
    of a call is its name with a number (`name_is_id`), or stands before `after_id`. `hides_markers`: stray markers are
    no text, and a call needs no block around it."""

    begin: str
    end: str
    call_begin: str
    after_name: str
    after_arguments: str
    call_end: str
    before_name: str = ""
    name_is_id: bool = False
    after_id: str = ""
    hides_markers: bool = False

    @property
    def _markers(self) -> tuple[str, ...]:
        return (self.begin, self.call_begin, self.end, self.after_name, self.call_end)

    def _shown(self, text: str) -> str:
        for marker in self._markers if self.hides_markers else ():
            text = text.replace(marker, "")
        return text

    def parse(self, reader: CallReader) -> Wait[None]:
        if reader.content_is_json and not (yield from reader.at(self.begin)):
            yield from reader.rest()
        markers = self._markers if self.hides_markers else (self.begin,)
        while marker := (yield from reader.until(markers, reader.plain)):
            if marker == self.begin:
                yield from self._calls(reader)
            elif marker == self.call_begin:
                yield from self._call(reader, "")
            else:
                continue
            if not reader.behind_text:
                yield from reader.space()

    def _calls(self, reader: CallReader) -> Wait[None]:
        block = self.begin  # shown unless a call follows
        any_call = False
        while True:
            between: list[str] = []
            marker = yield from reader.until((self.call_begin, self.end), between.append)
            text = self._shown("".join(between))
            if block and (marker != self.call_begin or text.strip()):
                reader.no_call(self._shown(block) + text)
                block, text = "", ""
            if not block:
                reader.plain_unless_space(text)
            if marker != self.call_begin:
                reader.plain("" if any_call else self._shown(marker))
                return
            if (yield from self._call(reader, block + text if block else "")):
                any_call = True
            block = ""

    def _call(self, reader: CallReader, before: str) -> Wait[bool]:
        """`before` is shown if there is no call. False: there is no call."""
        head: list[str] = []
        others = self._markers[:-1] if self.hides_markers else ()  # also end a call that is not complete
        marker = yield from reader.until((self.after_name, self.call_end, *others), head.append)
        written = "".join(head)
        if marker != self.after_name:
            reader.no_call(self._shown(before + self.call_begin + written + marker))
            if marker in others:
                reader.unread(marker)
            return False
        written = written.strip() if self.name_is_id else written.removeprefix(self.before_name).strip()
        match = _KIMI_NAME.fullmatch(written) if self.name_is_id else None
        name = match[1] if match else written
        call_id = self._id(reader, name, written) if self.name_is_id else None
        if self.after_id and self.after_id in name:
            before_name, _, name = (part.strip() for part in name.partition(self.after_id))
            call_id = None if reader.is_json or not _ID.fullmatch(before_name) else before_name
        reader.open(name, call_id)
        if reader.is_json:
            yield from json_text.value(reader, reader.arguments)
        marker = yield from reader.until((self.after_arguments, self.call_end, *others), reader.arguments)
        if marker:
            reader.close()
        if marker in others:
            reader.unread(marker)
        return True

    @staticmethod
    def _id(reader: CallReader, name: str, written: str) -> str:
        """The id that the model wrote; a counted id if it has no number, or a number from a grammar."""
        own = _NUMBERED.search(written) and not reader.is_json
        return written if own else counted_id(name, reader.first_call + reader.num_calls)


DEEPSEEK_V3 = NamedFormat(
    CALLS_BEGIN, CALLS_END, CALL_BEGIN, "\n```json\n", f"\n```{CALL_END}", CALL_END, f"function{SEPARATOR}"
)
DEEPSEEK_V31 = NamedFormat(CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEPARATOR, CALL_END, CALL_END)
KIMI_K2 = NamedFormat(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call_end|>", name_is_id=True, hides_markers=True,
)  # fmt: skip
SOLAR_OPEN = NamedFormat(
    "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>",
    "<|tool_call:end|>", after_id="<|tool_call:name|>",
)  # fmt: skip
