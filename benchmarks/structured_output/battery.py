"""Generated schemas through an engine: each must be refused by name or enforced, and requests in the same batch must
keep their tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.structured_output.schemas import Drawn
from benchmarks.structured_output.validity import problem_of
from moe_engine.errors import InputError
from moe_engine.frontend.engine import Engine

FREE = ["The capital of France is", "What is 2 + 3?", "Once upon a time", "Data: "]
DRAFTS = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "NEXTN": {"speculative_algorithm": "NEXTN", **DRAFTS},
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
    "tp2": {"tp_size": 2},
    "dp2": {"dp_size": 2},
}
COMMON = {"dtype": "float32", "cpu_threads": 1, "max_running_requests": 32}
SUBSET = 60
"""Schemas of the forms with several ranks."""
AT_ONCE = 128
"""Concurrent constrained requests; the frontend queues up to 256 new grammars."""


@dataclass
class Outcome:
    """`tokens`: by number of the schema, for the comparison of greedy forms."""

    form: str
    finished: int = 0
    cut: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return self.reasons.total()

    def fault(self, drawn: Drawn | None, what: str, text: str = "") -> None:
        about = {} if drawn is None else {"feature": drawn.feature, "schema": drawn.schema}
        self.faults.append({**about, "fault": what, "text": text})


@contextmanager
def engine_of(name: str, backend: str, **flags: Any) -> Iterator[Engine]:
    flags = {**COMMON, **ENGINES[name], **flags}
    with Engine(grammar_backend=backend, **flags) as engine:
        yield engine


def server_flags(backend: str) -> list[str]:
    """The flags of the engine ``plain`` for a server."""
    flags = {**COMMON, "grammar_backend": backend}
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def run_form(engine: Engine, form: str, schemas: Sequence[Drawn], temperature: float, max_new_tokens: int) -> Outcome:
    """Runs all schemas beside free requests, whose greedy tokens are compared with those of separate runs."""
    found = Outcome(form)
    greedy = {"temperature": 0, "max_new_tokens": 60}
    alone = [asyncio.run(_answer(engine, prompt, greedy)) for prompt in FREE]

    async def everything() -> list[Any]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def constrained(sampling: dict[str, Any]) -> Any:
            async with turns:
                return await _answer(engine, "Data: ", sampling)

        requests = []
        for i, drawn in enumerate(schemas):
            source = json.dumps(drawn.schema, ensure_ascii=False)  # as text: False is a schema too
            sampling = {"json_schema": source, "temperature": temperature, "sampling_seed": i}
            requests.append(constrained({**sampling, "max_new_tokens": max_new_tokens}))
        return await asyncio.gather(*requests, *[_answer(engine, prompt, greedy) for prompt in FREE])

    began = time.perf_counter()
    answers = asyncio.run(everything())
    found.seconds = time.perf_counter() - began
    for prompt, answer, own in zip(FREE, answers[len(schemas) :], alone):
        if isinstance(own, Exception) or isinstance(answer, Exception) or answer["output_ids"] != own["output_ids"]:
            found.fault(None, f"the free request {prompt!r} has other tokens among constrained ones: {answer}")
    for i, (drawn, answer) in enumerate(zip(schemas, answers)):
        _judge(found, i, drawn, answer)
    return found


async def _answer(engine: Engine, prompt: str, sampling: dict[str, Any]) -> Any:
    """The output, or the exception."""
    try:
        return await engine.async_generate(prompt, sampling)
    except Exception as error:
        return error


def _judge(found: Outcome, number: int, drawn: Drawn, answer: Any) -> None:
    if isinstance(answer, InputError) and answer.status == 400 and "sampling_params.json_schema: " in str(answer):
        if drawn.feature not in ("seldom enforced", "impossible") or "compilation crashed" in str(answer):
            found.reasons[f"{drawn.feature}: {_short(answer)}"] += 1
        else:
            found.reasons[f"({drawn.feature}) {_short(answer)}"] += 1
        return
    if isinstance(answer, Exception):
        found.fault(drawn, f"{type(answer).__name__}: {answer}")
        return
    reason = answer["meta_info"]["finish_reason"]
    found.tokens[number] = answer["output_ids"]
    if reason["type"] == "length":
        found.cut += 1
    elif reason["type"] != "stop":
        found.fault(drawn, f"ended with {reason}", answer["text"])
    else:
        found.finished += 1
        problem = problem_of(answer["text"], drawn.schema)
        if problem is not None:
            found.fault(drawn, problem, answer["text"])


def _short(error: Exception) -> str:
    return str(error).removeprefix("sampling_params.json_schema: ")[:160]


def compare(first: Outcome, other: Outcome, schemas: Sequence[Drawn]) -> None:
    """Greedy tokens do not depend on drafts and ranks."""
    for number, tokens in other.tokens.items():
        if tokens != first.tokens.get(number):
            other.fault(schemas[number], f"greedy tokens differ from those of form {first.form!r}")
