"""Cost of constraints: time to first token, decode throughput. `gaps.py` has the gaps of other streams."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from moe_engine.frontend.engine import Engine
from moe_engine.tuning.stats import median

STREAMS = 32
TARGETS = {"ttft": 1.05, "throughput": 0.95, "gaps": 1.05}
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
"""A schema whose outputs reach the benchmark's token limit."""
CALLS = r"(<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>[a-z]{3}</arg_value>\n</tool_call>\n){100}"
"""Mostly fixed texts: jump-forward computes many tokens in one step."""


def measure(engine: Engine, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians of interleaved runs, and their ratios."""
    return {"ttft": _ttft(engine, 20 * rounds), "throughput": _throughput(engine, rounds, tokens)}


def _ttft(engine: Engine, repeats: int) -> dict[str, Any]:
    """Seconds of a request of one token, without a grammar and with one that is compiled."""
    rng = random.Random(1)

    def seconds(constraint: dict[str, Any]) -> float:
        ids = rng.choices(range(300, 1200), k=64)  # no cached prefix
        began = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 1, **constraint})
        return time.perf_counter() - began

    kinds: dict[str, Callable[[], float]] = {
        "none": lambda: seconds({}),
        "cached": lambda: seconds({"json_schema": SCHEMA}),
    }
    times = _interleaved(kinds, repeats, rng)
    ratios = [cached / none for none, cached in zip(times["none"], times["cached"])]
    return {"none_s": median(times["none"]), "cached_s": median(times["cached"]), "ratio": median(ratios)}


def _throughput(engine: Engine, rounds: int, tokens: int) -> dict[str, Any]:
    """Output tokens per second of full batches, constrained and free."""
    rng = random.Random(2)

    def rate(constraint: dict[str, Any], streams: int = STREAMS) -> float:
        prompts = [rng.choices(range(300, 1200), k=8) for _ in range(streams)]
        sampling = {"max_new_tokens": tokens, "temperature": 1, "ignore_eos": True, **constraint}
        began = time.perf_counter()
        answers: Any = engine.generate(input_ids=prompts, sampling_params=[sampling] * streams)
        seconds = time.perf_counter() - began
        return sum(len(answer["output_ids"]) for answer in answers) / seconds

    kinds: dict[str, Callable[[], float]] = {
        "free": lambda: rate({}),
        "constrained": lambda: rate({"json_schema": SCHEMA}),
        "calls": lambda: rate({"regex": CALLS}),
        "one free": lambda: rate({}, 1),
        "one of calls": lambda: rate({"regex": CALLS}, 1),
    }
    rates = _interleaved(kinds, rounds, rng)
    return {
        "free_tok_s": median(rates["free"]),
        "constrained_tok_s": median(rates["constrained"]),
        "ratio": median([one / free for one, free in zip(rates["constrained"], rates["free"])]),
        "calls_tok_s": median(rates["calls"]),
        "one_free_tok_s": median(rates["one free"]),
        "one_of_calls_tok_s": median(rates["one of calls"]),
    }


def _interleaved(kinds: dict[str, Callable[[], float]], repeats: int, rng: random.Random) -> dict[str, list[float]]:
    """Values of each kind, in random order within a round, after one warm-up round."""
    values: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(repeats + 1):
        for name in rng.sample(sorted(kinds), len(kinds)):
            value = kinds[name]()
            if number:
                values[name].append(value)
    return values
