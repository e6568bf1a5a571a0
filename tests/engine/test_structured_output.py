"""Constrained requests in an engine: random schemas validated, drafts, overlap, neighbors, retraction."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.errors import InputError
from tests.examples import examples
from tests.structured_output.schemas import draw_schemas

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(9)]

FREE = ["The capital of France is", "What is 2 + 3?", "Once upon a time"]
NEXTN = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no overlap": {"disable_overlap_schedule": True},
    "NEXTN": NEXTN,
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
}
GREEDY = {"temperature": 0, "max_new_tokens": 100}
expected: dict[str, Any] = {}


@pytest.fixture(scope="module", params=FORMS)
def engine(request: pytest.FixtureRequest, forked_processes: None) -> Iterator[Engine]:
    with Engine(dtype="float32", cpu_threads=1, max_running_requests=32, **FORMS[request.param]) as engine:
        yield engine


def run(engine: Engine, sampling: list[dict[str, Any]], prompts: list[str]) -> list[dict[str, Any]]:
    found = engine.generate(prompts, sampling)
    assert isinstance(found, list)
    return found


def test_random_schemas_and_free_neighbors(engine: Engine) -> None:
    validation = pytest.importorskip("jsonschema", exc_type=ImportError)
    schemas = draw_schemas(random.randrange(1 << 30), examples(40))
    constrained = [
        {"json_schema": schema, "temperature": 1.5, "max_new_tokens": 200, "sampling_seed": i}
        for i, schema in enumerate(schemas)
    ]
    free = run(engine, [GREEDY] * len(FREE), FREE)
    found = run(engine, [*constrained, *[GREEDY] * len(FREE)], ["Data: "] * len(schemas) + FREE)
    assert [one["output_ids"] for one in found[len(schemas) :]] == [one["output_ids"] for one in free]
    finished = 0
    for schema, answer in zip(schemas, found):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            validation.validate(json.loads(answer["text"]), schema)
            finished += 1
        else:
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert finished > 0.8 * len(schemas)


def test_greedy_tokens_do_not_depend_on_drafts_and_overlap(engine: Engine) -> None:
    schemas = draw_schemas(7, 40)
    found = run(engine, [{"json_schema": schema, **GREEDY} for schema in schemas], ["The capital of France"] * 40)
    tokens = [one["output_ids"] for one in found]
    assert tokens == expected.setdefault("tokens", tokens)


def test_copies_stop_strings_and_choices(engine: Engine) -> None:
    copies = engine.generate("Number:", {"regex": "[0-9]{3}x[0-9]+", "n": 3, "stop": ["x"], "temperature": 1.2})
    assert isinstance(copies, list)
    for copy in copies:
        assert len(copy["text"]) == 3 and copy["text"].isdigit()
        assert copy["meta_info"]["finish_reason"]["matched"] == "x"
    answer = engine.generate("x", {"choice": ["Paris", "Rome"], "ignore_eos": True, "temperature": 2})
    assert answer["text"] in ("Paris", "Rome")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "(a"}, "sampling_params.regex: .*unclosed group"),
        ({"json_schema": {"not": {}}}, "sampling_params.json_schema: .*not"),
        ({"ebnf": "root ::= ("}, "sampling_params.ebnf: "),
    ],
)
def test_refusals_name_the_field(engine: Engine, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        engine.generate("x", fields)


def test_retracted_requests_keep_their_state() -> None:
    """A pool too small for all requests: some are retracted, and continue after their existing outputs."""
    schemas = draw_schemas(random.randrange(1 << 30), 12)
    sampling = [{"json_schema": schema, **GREEDY} for schema in schemas]
    sampling += [{"regex": "([a-z]{3}-){80}", **GREEDY}] * 6
    prompts = [f"{i} is the number of this prompt." for i in range(len(sampling))]
    flags: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "max_running_requests": 32}
    found = []
    for pool in (8192, 600):
        with Engine(max_total_tokens=pool, schedule_conservativeness=0.01, **flags) as engine:
            found.append(run(engine, sampling, prompts))
            assert not any(engine._loop.run(engine._frontend.client.call("check_integrity")))
    assert [one["output_ids"] for one in found[0]] == [one["output_ids"] for one in found[1]]
    assert sum(one["meta_info"]["num_retractions"] for one in found[1]) > 0
