"""Tool calls in outputs, for whole texts and streams (`--tool-call-parser`).

``formats.py`` lists the formats; ``named.py``, ``objects.py``, ``tagged.py`` and ``pythonic.py`` read them
through a ``CallReader``. Text that is not a call is plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.tokenizer.stop import Beginnings
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, ToolDelta
from moe_engine.tokenizer.tool_calls.formats import TOOL_FORMATS, CallSyntax, ParameterSyntax, ToolFormat

__all__ = [
    "TOOL_FORMATS",
    "CallSyntax",
    "ParameterSyntax",
    "ToolCallParser",
    "ToolDelta",
    "ToolFormat",
    "parameters_of",
]


class ToolCallParser:
    """Plain text and tool calls of one output.

    Calls of functions that were not offered are dropped, as in SGLang.

    Args:
        form: a key of `TOOL_FORMATS`.
        functions, parallel, is_json, content_is_json, first_call: as of `CallReader`.
    """

    def __init__(
        self,
        form: str,
        functions: Mapping[str, Any] | None = None,
        *,
        parallel: bool = True,
        is_json: bool = False,
        content_is_json: bool = False,
        first_call: int = 0,
    ) -> None:
        if form not in TOOL_FORMATS:
            raise ConfigError(f"--tool-call-parser {form}: not available yet; choose one of {', '.join(TOOL_FORMATS)}")
        self._is_json = is_json
        self._reader = CallReader(
            functions, parallel=parallel, is_json=is_json, content_is_json=content_is_json, first_call=first_call
        )
        self._parse = TOOL_FORMATS[form].parse(self._reader)

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def cut(self) -> bool:
        """Whether an enforced call has begun and not ended."""
        return self._is_json and self._reader.in_call

    def parts(self, text: str) -> list[str | ToolDelta]:
        """Adds text; returns the new plain text and the new pieces of calls, in the order of the output."""
        self._reader.add(text)
        next(self._parse, None)
        return self._reader.found()

    def last_parts(self, beginnings: Beginnings | None = None) -> list[str | ToolDelta]:
        """Text held back; call after the last text. A truncated call keeps the arguments received so far. `beginnings`:
        as of `without_cut_mark`; the beginning of a call whose name was cut is no text then."""
        self._reader.end(beginnings)
        next(self._parse, None)
        return self._reader.found()

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """`parts`, plain text and pieces of calls by themselves."""
        return _separated(self.parts(text))

    def finish(self, beginnings: Beginnings | None = None) -> tuple[str, list[ToolDelta]]:
        """`last_parts`, plain text and pieces of calls by themselves."""
        return _separated(self.last_parts(beginnings))


def _separated(parts: list[str | ToolDelta]) -> tuple[str, list[ToolDelta]]:
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolDelta)]


def parameters_of(tools: Any) -> dict[str, Any]:
    """The functions of a request's tools, with the schemas of their arguments."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
