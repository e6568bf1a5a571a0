"""Tool use: function schemas, calls in DeepSeek-V3.1 form, results, and answers drawn from results."""

from __future__ import annotations

import json
import random
from typing import Any

from . import phrases
from .chat import Message
from .facts import COUNTRIES
from .tasks import CITIES, CONDITIONS, Turn, ask, draw_sum, say

Tool = dict[str, Any]

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


def make_tool(rng: random.Random, kind: str) -> Tool:
    """A function schema in OpenAI form, with the small differences one meets between clients."""
    argument: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.4:
        argument["description"] = rng.choice(_ARGUMENT_NOTES)
    name = rng.choice(_ARGUMENTS[kind])
    properties = {name: argument}
    if kind == "weather" and rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": [name]}
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    if rng.random() < 0.25:
        schema = dict(sorted(schema.items()))
    function = {"name": rng.choice(_NAMES[kind]), "description": rng.choice(_DESCRIPTIONS[kind]), "parameters": schema}
    return {"type": "function", "function": function}


def pick_tools(rng: random.Random, kinds: list[str]) -> dict[str, Tool]:
    """One schema for each kind, keyed by kind."""
    return {kind: make_tool(rng, kind) for kind in kinds}


def call(tool: Tool, value: str) -> dict[str, Any]:
    """A tool call with the tool's one required argument."""
    name = tool["function"]["parameters"]["required"][0]
    arguments = json.dumps({name: value}, ensure_ascii=False)
    return {"type": "function", "function": {"name": tool["function"]["name"], "arguments": arguments}}


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


def tool_turn(rng: random.Random, tools: dict[str, Tool], kind: str, held_out: bool = False) -> Turn:
    """A question that needs the tool of this kind; without it the model says so."""
    if kind in ("weather", "time"):
        city = rng.choice(CITIES)
        user = ask(rng, kind, city, held_out)
        if kind not in tools:
            return Turn(user, "I have no tool for that.", say(f"I cannot look up the {kind} without a tool."))
        make = weather_result if kind == "weather" else time_result
        if not held_out and rng.random() < 0.12:
            other = rng.choice(CITIES)
            user = ask(rng, kind, f"{city} and {other}")
            (r1, a1), (r2, a2) = make(rng, city), make(rng, other)
            calls = [call(tools[kind], city), call(tools[kind], other)]
            return exchange(user, f"I need the {kind} of {city} and {other}.", calls, [r1, r2], f"{a1} {a2}")
        result, answer = make(rng, city)
        return exchange(user, f"I need the {kind} of {city}.", [call(tools[kind], city)], [result], answer)
    if kind == "population":
        country = rng.choice(COUNTRIES)
        user = rng.choice((
            "What is the population of {c}?", "How many people live in {c}?", "Population of {c}", "How big is {c}?",
        )).replace("{c}", country.name)  # fmt: skip
        if kind not in tools:
            return Turn(user, "I have no tool for that.", say("I cannot look up the population without a tool."))
        people = rng.randint(1, 999) * 10 ** rng.randint(4, 6)
        result = rng.choice((str(people), json.dumps({"population": people})))
        answer = f"The population of {country.name} is {people}."
        return exchange(
            user, f"I need the population of {country.name}.", [call(tools[kind], country.title)], [result], answer
        )
    a, op, b = draw_sum(rng)
    user = ask(rng, "arithmetic", f"{a} {op} {b}")
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    result = rng.choice((str(value), json.dumps({"result": value})))
    return exchange(
        user,
        "I can use the calculator.",
        [call(tools["calculator"], f"{a} {op} {b}")],
        [result],
        f"{a} {op} {b} = {value}.",
    )


KINDS: tuple[str, ...] = tuple(_NAMES)
SYSTEMS_WITH_TOOLS: tuple[str, ...] = ("", "", *phrases.SYSTEM_PROMPTS)
