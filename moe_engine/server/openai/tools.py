"""Tools of a chat request: which may be called, and the constraint that enforces `tool_choice` and strict functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.errors import InputError
from moe_engine.server.openai.types import ChatRequest
from moe_engine.structured_output.tool_choice import tool_constraint
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS
from moe_engine.types.constraint import Constraint


@dataclass(frozen=True)
class ToolWish:
    """
    `offered`: the functions in the prompt, as the client sent them. `called`: those that the model may call.
    `several`: more than one call is allowed.
    """

    offered: list[dict[str, Any]]
    called: list[dict[str, Any]]
    required: bool
    several: bool

    def constraint(self, form: str | None, given: Constraint | None) -> Constraint | None:
        """The constraint of the output.

        Args:
            form: the server's `--tool-call-parser`.
            given: the constraint of the request's other fields, which answers without calls match.

        Raises:
            InputError: a function that cannot be enforced, or a constraint together with enforced calls.
        """
        if not self.called or form is None:
            return given
        asked = len(self.called) < len(self.offered) or any(
            tool["function"].get("strict") is True for tool in self.called
        )
        strict = asked and TOOL_FORMATS[form].enforces_strict
        if not (self.required or strict or given is not None):
            return given
        if self.required and given is not None and _is_format_of_text(given):
            given = None  # there is no text
        where = "tool_choice" if self.required else "tools" if strict or given is None else given.where
        if given is not None and (self.required or given.kind != "json_schema"):
            if not self.required and not strict:
                return given
            words = f"{where} and {given.where}: a request has one constraint at most; leave one out"
            raise InputError(words, field=given.where)
        return tool_constraint(self.called, form, where, required=self.required, several=self.several, content=given)


def tool_wish(req: ChatRequest, tools: list[dict[str, Any]], form: str | None) -> ToolWish:
    """
    Args:
        tools: as the client sent them.
        form: the server's `--tool-call-parser`.

    Raises:
        InputError: the choice has the wrong form, or needs something that is missing.
    """
    choice = "auto" if req.tool_choice is None else req.tool_choice
    several = req.parallel_tool_calls is not False
    if choice in ("auto", "none"):
        used = tools if choice == "auto" else []
        return ToolWish(used, used, required=False, several=several)
    called, required, shown = tools, True, choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        called, required = _allowed(choice, tools)
        shown = "allowed_tools"
    elif isinstance(choice, dict):
        called, several, shown = [_named(choice, "tool_choice", tools)], False, "a named function"
    if not tools:
        raise _needs_tools()
    if form is None:
        raise InputError.at("tool_choice", f"{shown} needs a server with --tool-call-parser; use auto or none")
    return ToolWish(tools, called, required=required, several=several)


def _is_format_of_text(given: Constraint) -> bool:
    """Whether it is a JSON `response_format`, or `format` of `text`: unlike `json_schema`, it constrains answers
    without calls."""
    return given.where.startswith("response_format") and given.kind == "json_schema"


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The functions of OpenAI's `allowed_tools`, and whether one has to be called. All tools stay in the prompt."""
    field = "tool_choice.allowed_tools"
    wanted = choice.get("allowed_tools")
    if not isinstance(wanted, dict):
        raise InputError.at(field, f"expected an object, got {wanted!r:.80}")
    mode, names = wanted.get("mode"), wanted.get("tools")
    if mode not in ("auto", "required"):
        raise InputError.at(f"{field}.mode", f"expected 'auto' or 'required', got {mode!r:.80}")
    if not isinstance(names, list) or not names:
        raise InputError.at(f"{field}.tools", f"expected a list of length >= 1, got {names!r:.80}")
    called = [_named(name, f"{field}.tools[{i}]", tools) for i, name in enumerate(names)]
    return [tool for tool in tools if any(tool is other for other in called)], mode == "required"


def _named(choice: Any, field: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The tool that `{"type": "function", "function": {"name": ...}}` names."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind != "function":
        kinds = "'function' or 'allowed_tools'" if field == "tool_choice" else "'function'"
        raise InputError.at(f"{field}.type", f"expected {kinds}, got {kind!r:.80}")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    field = f"{field}.function.name"
    if not isinstance(name, str):
        raise InputError.at(field, f"expected a string, got {name!r:.80}")
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    if not tools:
        raise _needs_tools()
    raise InputError.at(field, f"{name!r:.80} is not the name of one of the tools")


def _needs_tools() -> InputError:
    return InputError.at("tool_choice", "needs tools; send some, or leave it out")
