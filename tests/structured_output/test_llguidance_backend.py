"""The backend alone: masks against Python's oracles, drafts, reasoning, refusals."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.structured_output.backend import GrammarBackend, GrammarError, GrammarSettings, Matcher
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from moe_engine.types.constraint import Constraint, FreeReasoning

SIZE, EOS = 1280, 1
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TRIGGERED = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "null"}}, "end": "!"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> GrammarBackend:
    return open_backend(GrammarSettings(), tokenizer, SIZE, (EOS,))


def allowed(state: Matcher) -> set[int]:
    mask = np.full(SIZE // 32, 0xFFFFFFFF, dtype=np.uint32)
    state.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(state: Matcher, ids: list[int]) -> bool:
    """True if the masks allow a text and its end."""
    for token in ids:
        if token not in allowed(state):
            return False
        state.accept(token)
    return EOS in allowed(state)


CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("regex", "(ab|c){2}[0-9]", ["abc1", "cc9"], ["ab1", "abc", "abc12"]),
    ("choice", ["yes", 'no "x"\n'], ["yes", 'no "x"\n'], ["y", "no", "yes "]),
    ("choice", ["a", "ab", "abc", "\\d", "é"], ["a", "ab", "abc", "\\d", "é"], ["", "b", "1", "abcd"]),
    ("choice", [f"item {i}" for i in range(5000)], ["item 0", "item 4999"], ["item", "item 5000"]),
    ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["", "ab"]),
    (
        "grammar",
        'root ::= x # "#\n\n # |\n  | [#|\n] x\n\t| "\\n|"\r\nx ::=\n  "k"',
        ["k", "#k", "|k", "\nk", "\n|"],
        ["", "|", "kk"],
    ),
    (
        "grammar",
        r'root ::= "\u00e9\U0001F600" [\u00e0-\u00ff] "\u0022\\u0041"',
        ['é😀ÿ"\\u0041'],
        ["é😀", 'é😀x"\\u0041', 'é😀ÿ"A'],
    ),
    ("grammar", 'start: "a" NUM\nNUM: /[0-9]{2}/', ["a12"], ["a1", "12"]),
    ("json_schema", {"type": "integer"}, ["12", "-3"], ["1.5", " 1", "1 ", '"1"']),
    ("json_schema", {"type": "object"}, ["{}", '{ "a": [1] }', '{\n  "a": 1\n}'], ["[]", '{  "a": 1}', "{}\n"]),
    ("structural_tag", TAGS, ["", "text <f>", "x<f=a>12</f> <f=b>true</f>y"], ["x<f=a>true</f>", "<f=c>", "<f=a>1"]),
    ("structural_tag", TRIGGERED, ["x<f=a>null!"], ["x", "<f=a>1!", "<f=a>null! more"]),
]


@pytest.mark.parametrize(("kind", "source", "good", "bad"), CASES)
def test_texts(
    backend: GrammarBackend, tokenizer: Tokenizer, kind: str, source: Any, good: list[str], bad: list[str]
) -> None:
    grammar = backend.compile(Constraint(kind, source if isinstance(source, str) else json.dumps(source)))
    for text in good:
        assert accepts(grammar.matcher(), tokenizer.encode(text, False)), text
    for text in bad:
        assert not accepts(grammar.matcher(), tokenizer.encode(text, False)), text


UNENFORCED: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"type": "object", "unevaluatedProperties": False},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "string", "format": "idn-email"},
    {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
]


@pytest.mark.parametrize("schema", UNENFORCED, ids=str)
def test_what_is_not_enforced_is_refused(backend: GrammarBackend, schema: dict[str, Any]) -> None:
    words = "uniqueItems|not|contains|propertyNames|dependentRequired|if|unevaluated|oneOf|format"
    with pytest.raises(GrammarError, match=words):
        backend.compile(Constraint("json_schema", json.dumps(schema)))
    tag = {**TAGS, "structures": [{"begin": "<f=a>", "schema": schema, "end": ""}]}
    with pytest.raises(GrammarError, match=words):
        backend.compile(Constraint("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("escape", ["ud83d", "U00110000"])
def test_escapes_that_are_no_characters(backend: GrammarBackend, escape: str) -> None:
    with pytest.raises(GrammarError, match=f"{escape} is not a character"):
        backend.compile(Constraint("grammar", f'root ::= "\\{escape}"'))


def test_rollback_restores_every_mask(backend: GrammarBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    check_rollback(backend, schema)


def check_rollback(backend: GrammarBackend, schema: dict[str, Any]) -> None:
    """Masks after reasoning and random tokens are those of before, whatever is rolled back."""
    constraint = Constraint("json_schema", json.dumps(schema))
    state = backend.compile(constraint).matcher(FreeReasoning("<think>", "</think>", True))
    masks = [allowed(state)]
    for token in [40, 41, 6]:
        state.accept(token)
        masks.append(allowed(state))
    while len(masks) < 40 and masks[-1] != {EOS}:
        state.accept(random.choice(sorted(masks[-1] - {EOS})))
        masks.append(allowed(state))
    back = len(masks) - 1
    while back:
        count = random.randint(1, back)
        state.rollback(count)
        back -= count
        assert allowed(state) == masks[back]


@pytest.mark.parametrize("tag", ["</think>", "|end|"])
def test_free_reasoning_ends_at_a_token(backend: GrammarBackend, tokenizer: Tokenizer, tag: str) -> None:
    """`|end|` has several tokens in this vocabulary."""
    grammar = backend.compile(Constraint("regex", "[0-9]+"))
    for seed in range(20):
        rng, state = random.Random(seed), grammar.matcher(FreeReasoning("<think>", tag, True))
        text = b""
        for token in [*rng.choices(range(260, SIZE), k=5), *tokenizer.encode(tag[:-2], False)]:
            assert EOS not in allowed(state)
            if token not in allowed(state):
                continue
            state.accept(token)
            text += tokenizer.token_bytes(token)
            assert tag.encode() not in text or text.endswith(tag.encode())
        for token in tokenizer.encode(tag, False):
            state.accept(token)
        digits = {t for t in range(3, SIZE) if re.fullmatch(rb"[0-9]+", tokenizer.exact_bytes(t))}
        assert allowed(state) == digits


def test_optional_reasoning(backend: GrammarBackend) -> None:
    state = backend.compile(Constraint("regex", "[0-9]")).matcher(FreeReasoning("<think>", "</think>", False))
    start, end = 5, 6
    first = allowed(state)
    assert start in first and EOS not in first and len(first) < 20
    state.accept(start)
    assert len(allowed(state)) > 1000
    state.accept(end)
    assert allowed(state) == first - {start}
    state.rollback(2)
    assert allowed(state) == first


def test_text_of_special_tokens(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    """A text that the tokenizer encodes as a special token is generated with ordinary tokens."""
    text = f"a{tokenizer.eos_token}b"
    assert tokenizer.special_ids & set(tokenizer.encode(text, False))
    state, ids = backend.compile(Constraint("choice", json.dumps([text]))).matcher(), list[int]()
    while len(ids) < 40 and EOS not in (found := allowed(state)):
        ids.append(min(found))
        state.accept(ids[-1])
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("compact", [False, True])
def test_white_space_of_json_may_be_disabled(tokenizer: Tokenizer, compact: bool) -> None:
    """``--constrained-json-disable-any-whitespace``."""
    settings = GrammarSettings(constrained_json_disable_any_whitespace=compact)
    fields = {"a": {"type": "integer"}, "b": {"type": "null"}}
    schema = {"type": "object", "properties": fields, "required": ["a", "b"], "additionalProperties": False}
    grammar = open_backend(settings, tokenizer, SIZE, (EOS,)).compile(Constraint("json_schema", json.dumps(schema)))
    found = [
        accepts(grammar.matcher(), tokenizer.encode(text, False)) for text in ('{"a":1,"b":null}', '{"a": 1, "b":null}')
    ]
    assert found == [True, not compact]
