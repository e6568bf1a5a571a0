"""`best_of` of /v1/completions: more sequences are generated than answered; those with the highest log-probability per
token are answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_engine.frontend.generation import Generation
from moe_engine.frontend.logprob_format import Columns, LogprobFormat, floats_of
from moe_engine.types import PackedLogprobs


class RankedLogprobs:
    """A format whose first column has the tokens' log-probabilities as numbers; `inner`: the response's, or None."""

    def __init__(self, inner: LogprobFormat | None) -> None:
        self._inner = inner

    def render(self, block: PackedLogprobs) -> Columns:
        return [floats_of(block.values), *(self._inner.render(block) if self._inner is not None else ())]

    def fields(self, columns: Columns) -> dict[str, Any]:
        return {} if self._inner is None else self._inner.fields(columns[1:])


def best(generations: Iterable[Generation], count: int) -> list[Generation]:
    """The `count` best sequences of each prompt, the best first, numbered prompt by prompt."""
    by_prompt: dict[int, list[Generation]] = {}
    for generation in generations:
        by_prompt.setdefault(generation.prompt_index, []).append(generation)
    chosen = [one for each in by_prompt.values() for one in sorted(each, key=_mean, reverse=True)[:count]]
    for index, generation in enumerate(chosen):
        generation.index = index
    return chosen


def _mean(generation: Generation) -> float:
    values = generation.output_logprobs[0] if generation.output_logprobs else []
    return sum(values) / len(values) if values else float("-inf")
