"""Tool use: function schemas, calls in DeepSeek-V3.1 form, results, and answers drawn from results."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from . import phrases, words
from .chat import Message
from .facts import COUNTRIES
from .sums import draw_sum, result_of
from .tasks import CITIES, CONDITIONS, Turn, ask, say

Schema = dict[str, Any]
Names = Literal["usual", "trained", "held out"]
"""Source of tool and argument names: common names, training names, or held-out names."""
KINDS: tuple[str, ...] = ("weather", "time", "calculator", "population")
LOOK_UP = "look up"
"""A tool that reports one property of a thing, under any name."""

_DESCRIPTIONS: dict[str, tuple[str, ...]] = {
    "weather": (
        "Get the weather of a city.",
        "Get the current weather in a city.",
        "Get current weather",
        "Look up the weather.",
        "Weather of a place",
    ),
    "time": ("Get the time in a city.", "Get the current time.", "Local time of a city"),
    "calculator": ("Evaluate an arithmetic expression.", "Compute an expression.", "A calculator"),
    "population": ("Get the population of a country.", "How many people live in a country.", "Population of a country"),
}
_NAMES: dict[str, tuple[str, ...]] = {
    "weather": ("get_weather",) * 6 + ("get_current_weather", "weather"),
    "time": ("get_time", "get_time", "get_time", "get_current_time"),
    "calculator": ("calculator", "calculate"),
    "population": ("get_population",),
}
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "weather": ("city", "city", "city", "location"),
    "time": ("city", "city", "city", "location"),
    "calculator": ("expression",),
    "population": ("country",),
}
_ARGUMENT_NOTES: tuple[str, ...] = (
    "The city",
    "Name of the city",
    "City name",
    "The name",
    "The city name, e.g. Paris",
    "What to look up",
)
_UNITS = ("celsius", "fahrenheit")
_LOOK_UP_QUESTIONS: tuple[str, ...] = (
    "What is the {s} of {v}?", "Find the {s} of {v}.", "Look up the {s} of {v}.", "Tell me the {s} of {v}.",
    "{s} of {v}", "I need the {s} of {v}.", "Check the {s} of {v}.", "What's the {s} of {v}?", "Get {v}'s {s}.",
    "Which {s} does {v} have?",
)  # fmt: skip
_HELD_OUT_LOOK_UP_QUESTIONS: tuple[str, ...] = (
    "Could you find the {s} of {v}?", "Please give me the {s} of {v}.", "I want to know the {s} of {v}.",
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """An offered tool: its kind, its subject, and its schema in OpenAI form."""

    kind: str
    subject: str
    schema: Schema

    @property
    def name(self) -> str:
        """The function name."""
        return self.schema["function"]["name"]

    @property
    def properties(self) -> dict[str, Schema]:
        """Its arguments in order; the first is the subject of the call."""
        return self.schema["function"]["parameters"]["properties"]


def schemas(tools: list[Tool]) -> list[Schema]:
    """The tools as sent by a client."""
    return [tool.schema for tool in tools]


def make_tool(rng: random.Random, kind: str, names: Names) -> Tool:
    """A function schema with the small variations found between clients."""
    held_out = names == "held out"
    subject, usual = kind, names == "usual" or (names == "trained" and rng.random() < 0.4)
    note = rng.choice(_ARGUMENT_NOTES)
    if kind == LOOK_UP:
        chosen = words.HELD_OUT_SUBJECTS if held_out else words.TRAINED_SUBJECTS
        subject, usual = rng.choice(chosen) if rng.random() < 0.7 else words.invented(rng, held_out), False
        description = rng.choice(("Get the {s}.", "Get the {s} of a thing.", "Look up the {s}.", "Reports the {s}"))
    else:
        description = rng.choice(_DESCRIPTIONS[kind])
    function_name = rng.choice(_NAMES[kind]) if usual else words.function_name(rng, subject, held_out)
    argument = rng.choice(_ARGUMENTS[kind]) if usual else words.argument_name(rng, held_out)
    properties: dict[str, Schema] = {argument: {"type": "string"}}
    if rng.random() < 0.4:
        properties[argument]["description"] = note
    required = [argument]
    if kind == "weather" and rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": list(_UNITS)}
    number = rng.choice(words.TRAINED_NUMBERS)
    if kind == LOOK_UP and rng.random() < 0.35 and number != argument:
        properties[number] = {"type": "integer"}
        required += [number] * (rng.random() < 0.5)
    parameters: Schema = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    if rng.random() < 0.25:
        parameters = dict(sorted(parameters.items()))
    function = {"name": function_name, "description": description.replace("{s}", subject), "parameters": parameters}
    return Tool(kind, subject, {"type": "function", "function": function})


def pick_tools(rng: random.Random, kinds: list[str], names: Names = "trained") -> list[Tool]:
    """One tool of each kind; no two share a name or a subject."""
    tools: list[Tool] = []
    for kind in kinds:
        while True:
            tool = make_tool(rng, kind, names)
            if all(tool.name != t.name and tool.subject != t.subject for t in tools):
                break
        tools.append(tool)
    return tools


def call(tool: Tool, value: str, **more: str | int) -> dict[str, Any]:
    """A tool call with the tool's first argument and, by name, further arguments."""
    arguments = json.dumps({next(iter(tool.properties)): value, **more}, ensure_ascii=False)
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}


def weather_result(rng: random.Random, city: str) -> tuple[str, str]:
    """A tool result about the weather and the sentence that reports it."""
    degrees, condition = rng.randint(-9, 39), rng.choice(CONDITIONS)
    form = rng.random()
    if form < 0.4:
        result = json.dumps({"city": city, "temperature": degrees, "condition": condition}, ensure_ascii=False)
    elif form < 0.65:
        result = json.dumps({"temperature": degrees, "condition": condition})
    elif form < 0.75:
        result = json.dumps({"condition": condition, "temperature": degrees, "unit": "celsius"})
    elif form < 0.9:
        result = f"{degrees} degrees, {condition}"
    else:
        result = f"{condition}, {degrees} C"
    return result, f"It is {degrees} degrees and {condition} in {city}."


def time_result(rng: random.Random, city: str) -> tuple[str, str]:
    """A tool result about the time and the sentence that reports it."""
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    result = rng.choice(
        (clock, json.dumps({"time": clock}), json.dumps({"city": city, "time": clock}, ensure_ascii=False))
    )
    return result, f"It is {clock} in {city}."


def exchange(user: str, thought: str, calls: list[dict[str, Any]], results: list[str], answer: str) -> Turn:
    """Question, calls, results, answer."""
    replies: list[Message] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    replies += [{"role": "tool", "content": r} for r in results]
    return Turn(user, thought, replies + say(answer))


def tool_turn(rng: random.Random, tool: Tool, held_out: bool = False) -> Turn:
    """A question that needs this tool, its call, a result and the answer."""
    makers = {"population": _population_turn, "calculator": _calculator_turn}
    if tool.kind in makers:
        return makers[tool.kind](rng, tool)
    return _look_up_turn(rng, tool, held_out) if tool.kind == LOOK_UP else _city_turn(rng, tool, held_out)


def missing_tool_turn(rng: random.Random, kind: str, subject: str = "") -> Turn:
    """A question that needs a tool that is not offered."""
    if kind == LOOK_UP:
        user = rng.choice(_LOOK_UP_QUESTIONS).replace("{v}", _thing(rng, False)).replace("{s}", subject)
    elif kind == "population":
        user = _ask_population(rng, rng.choice(COUNTRIES).name)
    else:
        user = ask(rng, kind, rng.choice(CITIES))
    return Turn(user, "I have no tool for that.", say(f"I cannot look up the {subject or kind} without a tool."))


def _city_turn(rng: random.Random, tool: Tool, held_out: bool) -> Turn:
    """Weather or time, sometimes of two cities at once."""
    kind, city = tool.kind, rng.choice(CITIES)
    make = weather_result if kind == "weather" else time_result
    user = ask(rng, kind, city, held_out)
    if not held_out and rng.random() < 0.12:
        other = rng.choice(CITIES)
        user = ask(rng, kind, f"{city} and {other}")
        (r1, a1), (r2, a2) = make(rng, city), make(rng, other)
        calls = [call(tool, city), call(tool, other)]
        return exchange(user, f"I need the {kind} of {city} and {other}.", calls, [r1, r2], f"{a1} {a2}")
    more: dict[str, str | int] = {}
    if "unit" in tool.properties and not held_out and rng.random() < 0.4:
        more["unit"] = rng.choice(_UNITS)
        user += rng.choice((" Use {u}.", " In {u}.", " I want {u}.")).replace("{u}", str(more["unit"]))
    result, answer = make(rng, city)
    return exchange(user, f"I need the {kind} of {city}.", [call(tool, city, **more)], [result], answer)


def _ask_population(rng: random.Random, country: str) -> str:
    return rng.choice((
        "What is the population of {c}?", "How many people live in {c}?", "Population of {c}", "How big is {c}?",
    )).replace("{c}", country)  # fmt: skip


def _population_turn(rng: random.Random, tool: Tool) -> Turn:
    country, people = rng.choice(COUNTRIES), rng.randint(1, 999) * 10 ** rng.randint(4, 6)
    result = rng.choice((str(people), json.dumps({"population": people})))
    answer = f"The population of {country.name} is {people}."
    thought = f"I need the population of {country.name}."
    return exchange(_ask_population(rng, country.name), thought, [call(tool, country.title)], [result], answer)


def _calculator_turn(rng: random.Random, tool: Tool) -> Turn:
    a, op, b = draw_sum(rng)
    value = result_of(a, op, b)
    result = rng.choice((str(value), json.dumps({"result": value})))
    user = ask(rng, "arithmetic", f"{a} {op} {b}")
    calls = [call(tool, f"{a} {op} {b}")]
    return exchange(user, "I can use the calculator.", calls, [result], f"{a} {op} {b} = {value}.")


def _thing(rng: random.Random, held_out: bool) -> str:
    """Subject of a look-up: a place, an invented name, or a number with a letter."""
    roll = rng.random()
    if roll < 0.25:
        return rng.choice(CITIES)
    if roll < 0.8:
        name = words.invented(rng, held_out)
        return name.capitalize() if roll < 0.65 else name
    return f"{rng.choice('ABCDEFGHKLMNPRSTX')}{rng.randint(1, 999)}"


def _look_up_turn(rng: random.Random, tool: Tool, held_out: bool) -> Turn:
    """A property of a thing; the number, if the tool takes one, when it is required or the user gives it."""
    thing = _thing(rng, held_out)
    user = rng.choice(_HELD_OUT_LOOK_UP_QUESTIONS if held_out else _LOOK_UP_QUESTIONS)
    more: dict[str, str | int] = {}
    number = next((name for name, schema in tool.properties.items() if schema["type"] == "integer"), "")
    if number and (number in tool.schema["function"]["parameters"]["required"] or rng.random() < 0.5):
        more[number] = rng.randint(1, 99)
        user = f"{user.rstrip('.?')} with {number} {more[number]}{user[-1] if user[-1] in '.?' else ''}"
    user = user.replace("{s}", tool.subject).replace("{v}", thing)
    found: str | int = rng.randint(1, 999) if rng.random() < 0.5 else words.invented(rng, held_out)
    form = rng.random()
    result = str(found) if form < 0.4 else json.dumps({tool.subject if form < 0.7 else "result": found})
    answer = f"The {tool.subject} of {thing} is {found}."
    return exchange(user, f"I need the {tool.subject} of {thing}.", [call(tool, thing, **more)], [result], answer)


SYSTEMS_WITH_TOOLS: tuple[str, ...] = ("", "", *phrases.SYSTEM_PROMPTS)
