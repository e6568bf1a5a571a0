"""Everything that a parser of tool calls finds in an output."""

from __future__ import annotations

from moe_engine.tokenizer.stop import Beginnings
from moe_engine.tokenizer.tool_calls import ToolCallParser


def read_calls(
    parser: ToolCallParser, text: str, size: int, beginnings: Beginnings | None = None
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Plain text, names of calls with the text of their arguments, and ids of calls. The parser gets `size` characters
    at a time. `beginnings`: those of marks, of a text that was cut."""
    shown, calls, ids = "", list[list[str]](), list[str]()
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    for plain, deltas in [*pieces, parser.finish(beginnings)]:
        shown += plain
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
                ids.append(str(delta.id))
            calls[delta.index][1] += delta.arguments
    return shown, [(name, arguments) for name, arguments in calls], ids
