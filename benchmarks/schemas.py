"""JSON schemas of the kinds that public suites have, drawn from a seed; every answer that fits one is short."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "city", "tags", "kind", "unit", "items", "price", "note", "owner", "id", "path")
WORDS = ("red", "green", "blue", "celsius", "file.txt", "north", "über", 'say "hi"', "", "yes/no")
PATTERNS = (r"^[A-Z]{2}[0-9]{3}$", r"^(foo|bar|baz)+$", r"^[a-f0-9]{8}$", r"^\d{4}-\d{2}$", r"^[^\s@]{1,8}@[a-z]{2,8}\.com$")
KINDS = ("object", "enum", "pattern", "recursion", "union", "range", "array", "nested")


def schema(seed: int) -> tuple[str, Schema]:
    """The kind (`KINDS` by turns) and a schema of it, the same for the same seed."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    if kind == "recursion":
        return kind, _recursion(rng)
    if kind == "object":
        return kind, _object(rng, 0)
    if kind == "nested":
        return kind, _object(rng, 2)
    part = {"enum": _enum, "pattern": _pattern, "range": _range, "union": _union, "array": _array}[kind]
    return kind, _properties({name: part(rng) for name in rng.sample(NAMES, rng.randint(1, 3))}, rng)


def _properties(properties: Schema, rng: random.Random) -> Schema:
    required = [name for name in properties if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(rng: random.Random, depth: int) -> Schema:
    return _properties({name: _any(rng, depth) for name in rng.sample(NAMES, rng.randint(1, 4))}, rng)


def _any(rng: random.Random, depth: int) -> Schema:
    parts = [_string, _enum, _range, _pattern, lambda r: {"type": "boolean"}, lambda r: {"type": "null"}]
    deeper = [lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1), lambda r: _union(r, depth - 1)]
    return rng.choice(parts + (2 * deeper if depth else []))(rng)


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _enum(rng: random.Random) -> Schema:
    if rng.random() < 0.2:
        return {"const": rng.choice([1, None, True, "fixed", [1, "a"], {"a": {"b": 2}}])}
    return {"enum": [*rng.sample(WORDS, rng.randint(1, 4)), *rng.sample([1, 2.5, None, True, -7], rng.randint(0, 2))]}


def _pattern(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 16}


def _range(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(1, 5000)
    if rng.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 1}
    if rng.random() < 0.2:
        return {"type": "integer", "minimum": low, "maximum": high + 40, "multipleOf": rng.choice([2, 5, 10])}
    return {"type": "integer", "minimum": low, "maximum": high}


def _array(rng: random.Random, depth: int = 0) -> Schema:
    if rng.random() < 0.25:
        parts = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int = 0) -> Schema:
    if rng.random() < 0.3:
        return {"type": rng.sample(["boolean", "null"], 2)}
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _recursion(rng: random.Random) -> Schema:
    node = _properties(
        {"value": _any(rng, 0), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, rng
    )
    node["required"] = ["value"]
    if rng.random() < 0.5:
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    link = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    return {"$defs": {"node": node}, **_properties({"tree": link, "name": _string(rng)}, rng)}
