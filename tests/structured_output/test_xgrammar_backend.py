"""The xgrammar backend: texts, refusals of unenforced keywords, drafts, generated schemas, an engine."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import ConfigError, InputError
from moe_engine.planning.prepare import prepare
from moe_engine.structured_output.backend import GrammarBackend, GrammarError, GrammarSettings
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.structured_output.xgrammar_limits import check_regex, check_schema
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from moe_engine.types.constraint import Constraint
from tests.structured_output.test_llguidance_backend import EOS, SIZE, check_rollback
from tests.structured_output.test_tool_calls import spells

installed = pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs xgrammar")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> GrammarBackend:
    pytest.importorskip("xgrammar", exc_type=ImportError)
    return open_backend(GrammarSettings("xgrammar"), tokenizer, SIZE, (EOS,))


PLACE = {
    "type": "object",
    "properties": {"é": {"type": "integer", "minimum": 1, "maximum": 12}, "b": {"type": "string", "enum": ["x", "y"]}},
    "required": ["é"],
    "additionalProperties": False,
}
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("regex", "(ab|c){2}[0-9]", ["abc1", "cc9"], ["ab1", "abc", "abc12"]),
    ("regex", "a|b", ["a", "b"], ["ab", ""]),
    ("choice", ["yes", 'no "x"\n\\', "ü🙂"], ["yes", 'no "x"\n\\', "ü🙂"], ["y", "no", "yes "]),
    ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["", "ab"]),
    ("json_schema", {"type": "object"}, ["{}", '{ "a": [1] }'], ["[]", "{}}"]),
    ("json_schema", PLACE, ['{"é":12}', '{"é": 3, "b":"y"}'], ["{}", '{"é":13}', '{"é":1,"b":"z"}', '{"é":1,"c":1}']),
    ("json_schema", True, ["[1]", "null"], ["["]),
]


@pytest.mark.parametrize(("kind", "source", "good", "bad"), CASES)
def test_texts(
    backend: GrammarBackend, tokenizer: Tokenizer, kind: str, source: Any, good: list[str], bad: list[str]
) -> None:
    grammar = backend.compile(Constraint(kind, source if isinstance(source, str) else json.dumps(source)))
    for text in good:
        assert spells(tokenizer, grammar.matcher(), text), text
    for text in bad:
        assert not spells(tokenizer, grammar.matcher(), text), text


REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "maxLength": 5}, "/maxLength"),  # raw control characters
    ({"type": "string", "pattern": "^a?b$"}, "pattern"),
    ({"type": "string", "pattern": "a"}, "/pattern"),
    ({"type": "string", "pattern": "^[^a]$"}, "pattern"),
    ({"type": "string", "format": "date"}, "/format: 'date'"),
    ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    ({"type": "array", "items": {"type": "string", "minLength": 1}}, "/items/minLength"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "needs a type"),
    ({"type": "string", "enum": ["a", 4]}, "/type"),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, "additionalProperties must be false"),
    ({"type": "object", "properties": {'"': True}, "additionalProperties": False}, "properties: the name"),
    ({"type": "object", "required": ["a"]}, "/required"),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, r"/\$defs/a: needs a type"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "/type"),
    (False, "false allows no value"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_enforced_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        check_schema(schema)


@pytest.mark.parametrize("pattern", ["a?", ".", "[^a]", r"\d", "(?=a)", "a\n"])
def test_regular_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="pattern"):
        check_regex(pattern)


@pytest.mark.parametrize("kind", ["structural_tag", "tool_calls"])
def test_kinds_of_the_other_backend(backend: GrammarBackend, kind: str) -> None:
    with pytest.raises(GrammarError, match="use llguidance"):
        backend.compile(Constraint(kind, "{}"))


def test_errors_of_the_library(backend: GrammarBackend) -> None:
    with pytest.raises(GrammarError, match=r"^[^\[]"):
        backend.compile(Constraint("grammar", 'root ::= ("'))


def test_rollback_restores_every_mask(backend: GrammarBackend) -> None:
    check_rollback(backend, PLACE)


@installed
def test_texts_of_drawn_schemas_are_valid() -> None:
    from benchmarks.structured_output.schemas import draw_schemas
    from benchmarks.structured_output.walks import run_walks

    seed = random.randrange(1 << 30)
    found = run_walks("xgrammar", draw_schemas(seed, 300), seed, 3)
    assert not found.faults, found.faults[0]
    assert found.finished > 100


@installed
@pytest.mark.usefixtures("forked_processes")
def test_requests_of_an_engine() -> None:
    with Engine(dtype="float32", cpu_threads=1, grammar_backend="xgrammar", max_total_tokens=2048) as engine:
        answer: Any = engine.generate("x", {"json_schema": PLACE, "temperature": 1.5, "max_new_tokens": 100})
        value = json.loads(answer["text"])
        assert 1 <= value["é"] <= 12 and set(value) <= {"é", "b"}
        with pytest.raises(InputError, match=r"sampling_params\.json_schema: /maxLength is not enforced"):
            engine.generate("x", {"json_schema": {"type": "string", "maxLength": 5}})


def test_launch_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_engine.planning.flags.validate_server.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--grammar-backend xgrammar: is not installed; .*\.\[xgrammar\]"):
        prepare(EngineArgs.from_kwargs(grammar_backend="xgrammar"))
    monkeypatch.setattr("moe_engine.planning.flags.validate_server.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="--constrained-json-whitespace-pattern needs --grammar-backend llguidance"):
        prepare(EngineArgs.from_kwargs(grammar_backend="xgrammar", constrained_json_whitespace_pattern=" "))
