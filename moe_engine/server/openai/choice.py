"""One choice of a chat response: its text parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_engine.server.openai.types import ChatRequest
from moe_engine.server.state import ServerState
from moe_engine.tokenizer.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_parser, starts_inside
from moe_engine.tokenizer.stop import Beginnings
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, ToolCallParser, ToolDelta, parameters_of


@dataclass(frozen=True)
class Enforced:
    """Parts of an output that a grammar makes JSON: the arguments of tool calls, the content."""

    calls: bool = False
    content: bool = False


@dataclass(frozen=True)
class ParserOptions:
    """Parser options of one request's choices."""

    reasoning: ReasoningFormat | None = None
    inside: bool = False
    """The output starts inside the reasoning."""
    stream_reasoning: bool = True
    shows_reasoning: bool = True
    """False: reasoning is parsed and left out."""
    tool_form: str | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions that may be called, with the schemas of their arguments."""
    parallel_tools: bool = True
    enforced: Enforced = Enforced()
    first_call: int = 0
    """Calls in the conversation before the output."""
    keep_special: frozenset[int] = frozenset()
    """Special tokens kept in the text for the parsers."""
    think_start_id: int | None = None
    """None also if the start tag is several tokens."""
    think_end_id: int | None = None
    fills_content: bool = False
    """Reasoning without content after it is the content (SGLang's `force_nonempty_content`)."""

    def count_reasoning(self, output_ids: Sequence[int]) -> int:
        """Tokens up to and including `</think>`; all of them if it is missing; 0 without reasoning, where a text may
        contain the tag."""
        if self.think_end_id is None:
            return 0
        ends = self.think_end_id in output_ids
        until = output_ids[: output_ids.index(self.think_end_id) + 1] if ends else output_ids
        begun = self.inside or (ends if self.think_start_id is None else self.think_start_id in until)
        return len(until) if begun else 0


def parser_options(
    state: ServerState,
    req: ChatRequest,
    prompt: str,
    tools: Sequence[dict[str, Any]],
    enforced: Enforced,
    first_call: int,
) -> ParserOptions:
    """Parser options for the output of `prompt`, from flags and request."""
    flags, tokenizer = state.flags, state.tokenizer()
    shown = req.include_reasoning is not False
    parser = flags.reasoning_parser if req.separate_reasoning is not False or not shown else None
    reasoning = REASONING_FORMATS[parser] if parser else None
    kwargs, continued = state.template_arguments(req.chat_template_kwargs), bool(req.continue_final_message)
    inside = starts_inside(parser, prompt, kwargs, continued) if parser else False
    form = flags.tool_call_parser if tools else None
    markers = (reasoning.markers if reasoning else ()) + (TOOL_FORMATS[form].markers if form else ())
    ids = (tokenizer.token_id(marker) for marker in markers)
    return ParserOptions(
        reasoning=reasoning,
        inside=inside,
        stream_reasoning=req.stream_reasoning is not False,
        shows_reasoning=shown,
        tool_form=form,
        functions=parameters_of(tools),
        parallel_tools=req.parallel_tool_calls is not False,
        enforced=enforced,
        first_call=first_call,
        keep_special=frozenset(i for i in ids if i is not None and i in tokenizer.special_ids),
        think_start_id=tokenizer.token_id(reasoning.start) if reasoning else None,
        think_end_id=tokenizer.token_id(reasoning.end) if reasoning else None,
        fills_content=bool(kwargs.get("force_nonempty_content")),
    )


class ChoiceParser:
    """Passes text through the reasoning parser and its content through the tool-call parser."""

    def __init__(self, options: ParserOptions) -> None:
        self._reasoning = (
            reasoning_parser(options.reasoning, inside=options.inside, stream_reasoning=options.stream_reasoning)
            if options.reasoning
            else None
        )
        self._shows_reasoning = options.shows_reasoning
        self._fills: list[str] | None = [] if options.fills_content else None
        """The reasoning, while there is no content, if it may have to be the content."""
        self._tools = (
            ToolCallParser(
                options.tool_form,
                options.functions,
                parallel=options.parallel_tools,
                is_json=options.enforced.calls,
                content_is_json=options.enforced.content,
                first_call=options.first_call,
            )
            if options.tool_form
            else None
        )

    @property
    def parses(self) -> bool:
        """Whether deltas may differ from the text."""
        return self._reasoning is not None or self._tools is not None

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas of a piece of text."""
        if not text:
            return []
        if self._reasoning is None:
            return self._content(text)
        return self._parts(*self._reasoning.push(text))

    def finish(self, beginnings: Beginnings | None) -> list[dict[str, Any]]:
        """The deltas of the text held back; call after the last piece. `beginnings`: `Generation.beginnings`."""
        deltas: list[dict[str, Any]] = []
        if self._reasoning is not None:
            deltas += self._parts(*self._reasoning.finish(beginnings))
            if self._fills:
                deltas.append({"content": "".join(self._fills)})
        if self._tools is not None:
            deltas += _deltas(self._tools.last_parts(beginnings))
        return deltas

    def finish_reason(self, finish: dict[str, Any] | None) -> str | None:
        if finish is None:
            return None
        if finish["type"] == "stop" and self._tools is not None and self._tools.num_calls and not self._tools.cut:
            return "tool_calls"
        return finish["type"]

    def whole(self, text: str, beginnings: Beginnings | None) -> dict[str, Any]:
        """The message of a complete output; `beginnings` as of `finish`."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for delta in self.push(text) + self.finish(beginnings):
            content.append(delta.get("content", ""))
            reasoning.append(delta.get("reasoning_content", ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if self._fills:  # the content is the reasoning
            reasoning.clear()
        shown = "".join(content)
        if calls and not shown.strip():
            shown = ""
        return {
            "role": "assistant",
            "content": shown if shown or not calls else None,
            "reasoning_content": "".join(reasoning) or None,
            "tool_calls": calls or None,
        }

    def _parts(self, reasoning: str, content: str) -> list[dict[str, Any]]:
        if self._fills is not None:
            self._fills = None if content else [*self._fills, reasoning] if reasoning else self._fills
        deltas = [{"reasoning_content": reasoning}] if reasoning and self._shows_reasoning else []
        return deltas + (self._content(content) if content else [])

    def _content(self, text: str) -> list[dict[str, Any]]:
        if self._tools is None:
            return [{"content": text}]
        return _deltas(self._tools.parts(text))


def _deltas(parts: list[str | ToolDelta]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for delta in parts:
        if isinstance(delta, str):
            out.append({"content": delta})
            continue
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
            call["function"]["name"] = delta.name
        out.append({"tool_calls": [call]})
    return out
