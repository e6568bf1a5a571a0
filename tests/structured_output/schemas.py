"""JSON schemas of many kinds, generated from a seed: every keyword that the backend enforces, nested and combined."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

LEAVES: list[Schema] = [
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"type": "integer", "exclusiveMinimum": 3, "maximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{1,2})?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"enum": ["red", "green", 'with "quotes"', 7, None]},
    {"const": "fixed ü"},
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"type": "boolean"}, {"const": "other"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 50}]},
]
TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def draw_schema(rng: random.Random, depth: int = 2) -> Schema:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(LEAVES)
    kind = rng.randrange(6)
    if kind == 0:
        return {
            "type": "array",
            "items": draw_schema(rng, depth - 1),
            "minItems": rng.randint(0, 1),
            "maxItems": rng.randint(1, 3),
        }
    if kind == 1:
        parts = [draw_schema(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == 2:
        return {"anyOf": [draw_schema(rng, depth - 1), {"type": "null"}]}
    if kind == 3:
        return {
            "type": "object",
            "patternProperties": {"^[a-c]$": draw_schema(rng, depth - 1)},
            "additionalProperties": False,
            "maxProperties": 2,
        }
    names = rng.sample(["name", "age", "tags", "é", "a b", "x"], rng.randint(1, 3))
    schema = {
        "type": "object",
        "properties": {name: draw_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if kind == 4:
        return {"$defs": {"inner": schema}, "$ref": "#/$defs/inner"} if depth == 2 else schema
    return schema


def draw_schemas(seed: int, count: int) -> list[Schema]:
    rng = random.Random(seed)
    found = [*LEAVES, TREE]
    return (found + [draw_schema(rng) for _ in range(max(0, count - len(found)))])[:count]
