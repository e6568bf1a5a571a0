"""Tool calls as a constraint: the markers of a format, names of functions, arguments that match their schemas.

Kind ``tool_calls``; the source is the JSON of `Calls`. Texts in it may contain special tokens. No backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from moe_engine.errors import InputError
from moe_engine.structured_output.request import json_source, read_constraint
from moe_engine.structured_output.tool_parameters import OneParameter, parameters_of_call
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, CallSyntax, ToolCallParser
from moe_engine.types.constraint import Constraint

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS = {"type": "object"}


class OneCall(TypedDict):
    """A call: `begin`, JSON of `schema`, `end`. With `after_number`, a number and this text follow `begin`.
    `parameters`, if set, replace the JSON."""

    name: str
    begin: str
    after_number: NotRequired[str]
    schema: Any
    parameters: NotRequired[list[OneParameter]]
    end: str


class Calls(TypedDict):
    """`begin`, `after_begin`, calls separated by `between`, `end`.

    Without `required` there may be text instead, or before the calls.

    `several`: more than one call is allowed. `content`: JSON of this schema replaces the text. `form`: the
    format, if it writes arguments one by one.
    """

    begin: str
    after_begin: str
    between: str
    end: str
    calls: list[OneCall]
    several: bool
    required: bool
    content: NotRequired[Any]
    form: NotRequired[str]


def tool_constraint(
    tools: Sequence[Mapping[str, Any]],
    form: str,
    where: str,
    *,
    required: bool,
    several: bool,
    content: Constraint | None = None,
) -> Constraint:
    """
    Args:
        tools: the functions that may be called, as in OpenAI's requests.
        form: a key of `TOOL_FORMATS`.
        where: the client's field, for messages.
        required: the output is calls only, whose arguments match. Otherwise only arguments of strict functions match;
        those of other functions are any object.
        content: the constraint of the text, of kind json_schema.

    Raises:
        InputError: names the field of the tool.
    """
    syntax = TOOL_FORMATS[form].syntax
    seen: set[str] = set()
    calls = []
    for i, tool in enumerate(tools):
        function, field = tool["function"], f"tools[{i}].function"
        if function["name"] in seen:
            raise InputError.at(f"{field}.name", f"{function['name']!r:.80} is defined twice")
        seen.add(function["name"])
        calls.append(_call(function, form, syntax, field, enforced=required or function.get("strict") is True))
    found = Calls(
        begin=syntax.begin, after_begin=syntax.after_begin, between=syntax.between, end=syntax.end,
        calls=calls, several=several, required=required,
    )  # fmt: skip
    if syntax.parameters is not None:
        found["form"] = form
    if content is not None:
        found["content"] = json.loads(read_constraint(content).source)
    return Constraint("tool_calls", json.dumps(found, ensure_ascii=False, separators=(",", ":")), where)


def _call(function: Mapping[str, Any], form: str, syntax: CallSyntax, field: str, *, enforced: bool) -> OneCall:
    name = function["name"]
    if not _is_readable(name, form, syntax):
        raise InputError.at(f"{field}.name", f"{name!r:.80} cannot be written in format {form}")
    schema = _arguments(function.get("parameters"), f"{field}.parameters") if enforced else ANY_ARGUMENTS
    if syntax.parameters is not None:
        whole = schema if enforced else function.get("parameters")
        whole = whole if isinstance(whole, Mapping) else {}
        found = parameters_of_call(whole, syntax.parameters, f"{field}.parameters", strict=enforced)
        begin, end = syntax.before_arguments(name), syntax.after_arguments
        return OneCall(name=name, begin=begin, schema=schema, parameters=found, end=end)
    if syntax.numbered:
        begin = f"{syntax.before_name}{name}:"
        return OneCall(
            name=name, begin=begin, after_number=syntax.after_name, schema=schema, end=syntax.after_arguments
        )
    return OneCall(name=name, begin=syntax.before_arguments(name), schema=schema, end=syntax.after_arguments)


def _is_readable(name: str, form: str, syntax: CallSyntax) -> bool:
    parser = ToolCallParser(form, is_json=syntax.parameters is not None)
    call = syntax.before_arguments(name) + ("" if syntax.parameters else "{}") + syntax.after_arguments
    deltas = parser.push(syntax.begin + syntax.after_begin + call + syntax.end)[1] + parser.finish()[1]
    return "".join(delta.arguments for delta in deltas) == "{}" and [d.name for d in deltas if d.name] == [name]


def _arguments(parameters: Any, field: str) -> Any:
    """The schema of a call's arguments, which are an object. Missing parameters: the function has none."""
    if parameters is None:
        return NO_PARAMETERS
    json_source(field, parameters, (dict,))
    if parameters.get("type", "object") != "object":
        raise InputError.at(f"{field}.type", f"expected 'object', got {parameters['type']!r:.80}")
    return {"type": "object", **parameters}
