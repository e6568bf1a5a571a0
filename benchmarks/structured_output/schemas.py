"""JSON schemas generated from a seed. One generator per feature; containers nest the schemas of other generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = Any
Generator = Callable[[random.Random, int], Schema]
NAMES = ["name", "age", "tags", "é", "a b", "x", 'q"q', "日本", "back\\slash", "0", "$id_", "emoji 🙂"]
TEXTS = ["red", "green", 'with "quotes"', "ünïcode", "tab\t", "line\n", "日本語", "", "a/b", "back\\slash", "🙂"]
PATTERNS = [
    "^[a-z]{2,5}$", "^[a-z]{2,5}(-[0-9]{1,2})?$", "^(ab|cd)+$", "^[A-Z][a-z]{0,6}$", r"^\d{3}-\d{4}$", "^a?b*c{1,3}$",
    "^[^a-z]{1,4}$", "^(foo|bar|baz qux)$", r"^\w{1,8}$", "^[äöü]{1,3}$", r"^[\"\\/]{1,3}$",
    r"^-?[0-9]{1,3}(\.[0-9]{1,2})?$",
    "^x$|^yy$", "^.{3}$", r"^\s?[a-f]{2}$", "b{2}", "^ab", "z$", r"^[^\"]{1,5}$",
]  # fmt: skip
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri"]


@dataclass(frozen=True)
class Drawn:
    feature: str
    schema: Schema


def integer(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(-2000, 2000)
    schema: dict[str, Any] = {"type": "integer"}
    schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([2, 9, 99, 1234, 100_000])
    return schema


def half_open(rng: random.Random, depth: int = 0) -> Schema:
    keyword = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
    return {"type": rng.choice(["integer", "number"]), keyword: rng.choice([0, 7, -13, 1000, -0.5, 2.25])}


def number(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.choice([0, -1, 0.5, -2.75, 10, -300.125])
    high = low + rng.choice([1, 0.25, 12.5, 1000])
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": high}


def multiple(rng: random.Random, depth: int = 0) -> Schema:
    if rng.random() < 0.3:
        return {"type": "number", "multipleOf": rng.choice([0.5, 0.25, 0.1, 2]), "minimum": 0, "maximum": 50}
    schema: dict[str, Any] = {"type": "integer", "multipleOf": rng.choice([2, 3, 5, 7, 10, 12])}
    if rng.random() < 0.7:
        schema |= {"minimum": rng.randint(-50, 0), "maximum": rng.randint(20, 300)}
    return schema


def text(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(0, 4)
    schema: dict[str, Any] = {"type": "string", "maxLength": low + rng.randint(0, 6)}
    return schema | ({"minLength": low} if rng.random() < 0.6 else {})


def pattern(rng: random.Random, depth: int = 0) -> Schema:
    schema: dict[str, Any] = {"type": "string", "pattern": rng.choice(PATTERNS)}
    if rng.random() < 0.2:
        schema |= {"maxLength": rng.randint(3, 9)}
    return schema


def formatted(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def enum(rng: random.Random, depth: int = 0) -> Schema:
    values: list[Any] = [*TEXTS, 7, -1.5, None, True, False, [1, "a"], {"k": "v"}, {}, 0, 1e3]
    return {"enum": rng.sample(values, rng.randint(1, 8))}


def typed_enum(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": "string", "enum": [*rng.sample(TEXTS, rng.randint(1, 5)), 4]}


def const(rng: random.Random, depth: int = 0) -> Schema:
    return {"const": rng.choice([*TEXTS, 12, -0.25, None, True, [1, [2]], {"a": 1, "é": [None]}])}


def nullable(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": [rng.choice(["string", "integer", "boolean"]), "null"], "maxLength": 3, "minimum": 0, "maximum": 9}


def simple(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": rng.choice(["boolean", "null", "number", "integer"])}


def array(rng: random.Random, depth: int = 2) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": draw(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def prefix_items(rng: random.Random, depth: int = 2) -> Schema:
    parts = [draw(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, {"type": "boolean"}])
    schema = {"type": "array", "prefixItems": parts, "items": rest, "maxItems": len(parts) + rng.randint(0, 1)}
    return schema | ({"minItems": rng.randint(0, len(parts))} if rng.random() < 0.8 else {})


def closed(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: draw(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def additional(rng: random.Random, depth: int = 2) -> Schema:
    schema = closed(rng, depth)
    rest = rng.choice([True, draw(rng, 0), {"type": "integer"}])
    return {**schema, "additionalProperties": rest, "maxProperties": len(schema["properties"]) + rng.randint(0, 2)}


def additional_by_default(rng: random.Random, depth: int = 2) -> Schema:
    return {key: value for key, value in closed(rng, depth).items() if key != "additionalProperties"}


def pattern_properties(rng: random.Random, depth: int = 2) -> Schema:
    keys = rng.sample(["^[a-c]$", "^x_[0-9]$", "^é+$", "s$"], rng.randint(1, 2))
    schema: dict[str, Any] = {
        "type": "object",
        "patternProperties": {key: draw(rng, depth - 1) for key in keys},
        "additionalProperties": rng.choice([False, False, {"type": "null"}]),
        "maxProperties": rng.randint(1, 3),
    }
    if rng.random() < 0.4:
        schema |= {"properties": {"name": draw(rng, depth - 1)}, "required": ["name"]}
    if rng.random() < 0.3:
        schema["minProperties"] = 1
    return schema


def required_unlisted(rng: random.Random, depth: int = 2) -> Schema:
    schema = additional(rng, depth)
    name = rng.choice([name for name in NAMES if name not in schema["properties"]])
    return {**schema, "required": [*schema["required"], name], "maxProperties": len(schema["properties"]) + 1}


def any_of(rng: random.Random, depth: int = 2) -> Schema:
    return {"anyOf": [draw(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def any_of_beside(rng: random.Random, depth: int = 2) -> Schema:
    base = closed(rng, depth)
    names = list(base["properties"])
    return {**base, "anyOf": [{"required": [name]} for name in names] or [True]}


def one_of(rng: random.Random, depth: int = 2) -> Schema:
    parts = [{"type": "boolean"}, text(rng), integer(rng), closed(rng, depth - 1), {"type": "null"}]
    return {"oneOf": rng.sample(parts, rng.randint(2, 3))}


def tagged_union(rng: random.Random, depth: int = 2) -> Schema:
    parts = []
    for kind in rng.sample(["cat", "dog", "bird"], 2):
        part = closed(rng, depth - 1)
        properties = {"kind": {"const": kind}, **part["properties"]}
        parts.append({**part, "properties": properties, "required": ["kind", *part["required"]]})
    return {rng.choice(["oneOf", "anyOf"]): parts}


def all_of(rng: random.Random, depth: int = 2) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"allOf": [integer(rng), {"minimum": -3000, "maximum": 200_000}, {"multipleOf": 2}]}
    if kind == 1:
        return {"allOf": [text(rng), {"type": "string", "minLength": 1}]}
    if kind == 2:
        names = rng.sample(NAMES, 3)
        parts = [{"type": "object", "properties": {n: draw(rng, depth - 1)}, "required": [n]} for n in names]
        return {"allOf": parts, "type": "object", "maxProperties": 3}
    return {"allOf": [{"type": "string", "pattern": "^[a-m]+$"}, {"pattern": "^.{2,6}$"}], "maxLength": 5}


def reference(rng: random.Random, depth: int = 2) -> Schema:
    word, name = rng.choice(["$defs", "definitions"]), rng.choice(["inner", "a b", "x/y", "é"])
    pointer = f"#/{word}/" + name.replace("/", "~1").replace(" ", "%20")
    inner = draw(rng, depth - 1)
    outer = closed(rng, depth)
    outer["properties"] = {"first": {"$ref": pointer}, **outer["properties"], "last": {"$ref": pointer}}
    outer["required"] = ["first", *outer["required"]]
    return {word: {name: inner}, **outer}


def recursion(rng: random.Random, depth: int = 2) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": draw(rng, 0),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": rng.choice([["value"], ["value", "next"]]),
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def recursive_root(rng: random.Random, depth: int = 2) -> Schema:
    return {"type": "object", "properties": {"x": draw(rng, 0), "self": {"$ref": "#"}}, "additionalProperties": False}


def without_type(rng: random.Random, depth: int = 2) -> Schema:
    return rng.choice(
        [{"maxLength": 3}, {"minimum": 5}, {"maxItems": 1}, {"properties": {"a": integer(rng)}}, {}, True]
    )


def annotated(rng: random.Random, depth: int = 2) -> Schema:
    words = {"title": "T", "description": "d", "default": 3, "examples": [1], "deprecated": True, "readOnly": True}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **words, **closed(rng, depth)}


def impossible(rng: random.Random, depth: int = 2) -> Schema:
    """No value matches, so the schema must be refused."""
    return rng.choice(
        [
            {"type": "integer", "minimum": 5, "maximum": 4}, {"type": "string", "minLength": 3, "maxLength": 2}, False,
            {"enum": []}, {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
            {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "array", "minItems": 2, "maxItems": 1},
        ]
    )  # fmt: skip


def seldom_enforced(rng: random.Random, depth: int = 2) -> Schema:
    """Keywords that a backend may not support. It must refuse unenforced keywords."""
    return rng.choice(
        [
            {"not": {"type": "string"}}, {"type": "array", "items": integer(rng), "uniqueItems": True, "maxItems": 3},
            {"type": "array", "contains": {"const": 1}, "maxItems": 3}, {"type": "string", "format": "idn-email"},
            {"type": "object", "propertyNames": {"maxLength": 2}, "maxProperties": 2},
            {"type": "object", "dependentRequired": {"a": ["b"]}, "maxProperties": 2},
            {"if": {"type": "string"}, "then": {"minLength": 3}, "type": ["string", "integer"]},
            {"type": "object", "unevaluatedProperties": False},
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"type": "string", "pattern": r"^(?!a)[a-c]{2}$"}, {"type": "string", "pattern": r"^(a|b)\1$"},
            {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "null"}},
            {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}, "maxProperties": 2},
            {"type": "array", "contains": {"type": "null"}, "minContains": 2, "maxItems": 3},
            {"$id": "https://example.com/s", "type": "integer", "$anchor": "a", "maximum": 3},
            {"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": False,
             "$schema": "http://json-schema.org/draft-07/schema#"},
            {"properties": {"a": {"const": 1}}, "minProperties": 1, "additionalProperties": False, "type": "object"},
            {"type": "array", "unevaluatedItems": False, "prefixItems": [{"const": 1}]},
            {"type": "object", "dependencies": {"a": ["b"]}, "maxProperties": 2},
            {"type": "string", "contentEncoding": "base64", "maxLength": 4}, {"$dynamicRef": "#x"},
            {"type": "string", "nullable": True, "maxLength": 3}, {"type": "integer", "minimum": "3"},
            {"enum": ["a", "b"], "maxLength": 0}, {"const": 5, "maximum": 3}, {"type": "string", "format": "regex"},
            {"type": "integer", "divisibleBy": 3}, {"extends": {"type": "null"}}, {"type": "any"},
        ]
    )  # fmt: skip


LEAVES: dict[str, Generator] = {
    "integer": integer, "half open range": half_open, "number": number, "multipleOf": multiple, "length": text,
    "pattern": pattern, "format": formatted, "enum": enum, "enum with type": typed_enum, "const": const,
    "nullable": nullable, "type": simple,
}  # fmt: skip
CONTAINERS: dict[str, Generator] = {
    "array": array, "prefixItems": prefix_items, "object": closed, "additionalProperties": additional,
    "additional by default": additional_by_default, "patternProperties": pattern_properties,
    "required, not listed": required_unlisted, "anyOf": any_of, "anyOf beside properties": any_of_beside,
    "oneOf": one_of, "tagged union": tagged_union, "allOf": all_of,
}  # fmt: skip
ROOTS: dict[str, Generator] = {
    "$ref": reference, "recursion": recursion, "recursive root": recursive_root, "without type": without_type,
    "annotations": annotated, "impossible": impossible, "seldom enforced": seldom_enforced,
}  # fmt: skip


def draw(rng: random.Random, depth: int) -> Schema:
    """Any feature that may be nested in another schema."""
    leaf = depth <= 0 or rng.random() < 0.5
    return rng.choice(list((LEAVES if leaf else CONTAINERS).values()))(rng, depth)


def draw_schemas(seed: int, count: int) -> list[Drawn]:
    """The same number of schemas of each feature, as nearly as possible; the last feature has twice as many."""
    generators = [*LEAVES.items(), *CONTAINERS.items(), *ROOTS.items(), ("seldom enforced", seldom_enforced)]
    rng = random.Random(seed)
    return [Drawn(name, make(rng, 2)) for name, make in (generators[i % len(generators)] for i in range(count))]
