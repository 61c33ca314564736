"""Values of tool parameters, which the model writes as bare text, read by the tool's JSON schema.

The format `<parameter=K>\\nV\\n</parameter>` carries no types: `5` may be a number or a string, and models write Python's
`True` and `None` where they mean JSON's. The schema decides; what is read is a value that JSON has and that fits the types
the schema names (`type`, `anyOf`, `oneOf`, `allOf`, `$ref`, `enum`, `const`, `properties`, `additionalProperties`, `items`,
`prefixItems`, `nullable`). Ranges, patterns and required keys are the tool's own to check.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_jax.files import parse_json
from ninfer_jax.text.messages import plain

WHITE = " \t\r\n"
_STEPS = 20_000  # schema nodes looked at for one value: far above real ones, and what a schema that names itself is cut at
_PYTHON_LENGTH = 1 << 16  # of a value read as a Python literal
_PYTHON_DEPTH = 60
_JOINED = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "nullable"}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][+-]?[0-9]{1,3})?")
_KINDS = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}


class Unfit(ValueError):
    """No reading of a value fits its schema."""


def typed(text: str, schema: object, root: object = None) -> Any:
    """The JSON value that `text` spells under a schema. `$ref` is looked up in `root`, by default the schema itself.

    - A schema that takes only strings gets the text as it stands, whatever it looks like: `123`, `null`, `"quoted"`.
    - Another type wins over string where both are taken and the text spells the other in full: `null` of string or null.
    - Without types, JSON other than a quoted string is read as such, the rest is a string.
    - `True`, `False`, `None` and Python lists and dicts count as JSON's; numbers as text (`+5`, `1e3`, `5.0` of an integer)
      as numbers; JSON in quotes as what is inside, where no string is taken. NaN and infinities are no values.
    - A member of an `enum` is preferred, others of its types are let through.

    Unfit where nothing fits.
    """
    root = schema if root is None else root
    if isinstance(schema, Mapping) and schema.get("type") == "string" and not schema.keys() & _JOINED:
        return text
    readings = list(_readings(text))
    for members in (True, False):
        for reading in readings:
            try:
                return _Fit(root, members).value(reading.value, schema, reading.loose)
            except Unfit:
                continue
    raise Unfit("no reading of the value fits its schema")


def parameter_schema(parameters: object, name: str) -> object:
    """The schema of one parameter, {} if the tool does not tell: from `properties`, wherever they stand, else from
    `additionalProperties`."""
    found, others = [], []
    for node in _objects(parameters):
        properties = node.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif isinstance(node.get("additionalProperties"), Mapping):
            others.append(node["additionalProperties"])
    found = found or others
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def parameter_names(parameters: object) -> frozenset[str]:
    """The names of all parameters that a tool's schema lists."""
    listed = [node["properties"] for node in _objects(parameters) if isinstance(node.get("properties"), Mapping)]
    return frozenset(str(name) for properties in listed for name in properties)


def resolve(reference: object, root: object) -> object:
    """The node that a local `$ref` (`#/$defs/City`) points to. Unfit for others and for what is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise Unfit(f"$ref {reference!r} is not inside the schema")
    node = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and len(part) < 9 and int(part) < len(node):
            node = node[int(part)]
        else:
            raise Unfit(f"$ref {reference!r} points nowhere")
    return node


def dumped(value: object) -> str:
    """JSON text, with characters as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class _Reading:
    """loose: strings inside may be read again where no string is taken."""

    value: object
    loose: bool = False


def _readings(text: str) -> Iterator[_Reading]:
    """Values that a text may stand for, the likelier first."""
    bare, quoted = text.strip(WHITE), None
    try:
        value = plain(parse_json(bare, "value"), "value")  # what may stand in a message, so also in the next request
    except ValueError:
        if (literal := _python(bare)) is not None:
            yield _Reading(literal, loose=True)
        elif bare == "None":
            yield _Reading(None)
    else:
        if isinstance(value, str):
            quoted = value
        else:
            yield _Reading(value, loose=True)
    yield _Reading(text)
    if quoted is not None:
        yield _Reading(quoted, loose=True)
    if _NUMBER.fullmatch(bare):
        number = float(bare)
        if math.isfinite(number):
            yield _Reading(int(bare) if bare.lstrip("+-").isdecimal() else number)
    if bare.lower() in _WORDS:
        yield _Reading(_WORDS[bare.lower()])


def _python(text: str) -> list | dict | bool | None:
    """A Python list, dict or truth value that JSON has too; None where there is none."""
    if text in ("True", "False"):
        return text == "True"
    if text[:1] not in ("[", "{") or len(text) > _PYTHON_LENGTH or re.search(r"[-+~]{9}", text):
        return None
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > _PYTHON_DEPTH:  # Python's own parser has a stack that must not overflow
        return None
    try:
        tree = ast.parse(text, mode="eval")
        keys = [[ast.dump(key) for key in node.keys if key] for node in ast.walk(tree) if isinstance(node, ast.Dict)]
        if any(len(set(names)) < len(names) for names in keys):  # all but the last would be lost
            return None
        value = plain(ast.literal_eval(tree), "value")
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return value if isinstance(value, list | dict) else None


def _objects(schema: object) -> Iterator[Mapping]:
    """The parts of a schema that say of one and the same object what it holds."""
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < 1000:
        node = waiting.pop(0)
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(node.get(key), list):
                waiting += node[key]
        if "$ref" in node:
            try:
                waiting.append(resolve(node["$ref"], schema))
            except Unfit:
                continue


class _Fit:
    """Fits one value to a schema, converting inside it where only one way is left."""

    def __init__(self, root: object, members: bool):
        self._root, self._members, self._steps = root, members, 0

    def value(self, value: Any, schema: object, loose: bool, refs: tuple[str, ...] = ()) -> Any:
        self._steps += 1
        if self._steps > _STEPS:
            raise Unfit("the schema is too large for one value")
        if schema is False:
            raise Unfit("nothing fits")
        if not isinstance(schema, Mapping):
            return value
        value = self._types(value, schema, loose)
        if "$ref" in schema:
            if schema["$ref"] in refs:
                raise Unfit("the schema names itself and nothing else")
            value = self.value(value, resolve(schema["$ref"], self._root), loose, (*refs, schema["$ref"]))
        for part in _list(schema, "allOf"):
            value = self.value(value, part, loose, refs)
        for key in ("anyOf", "oneOf"):
            if branches := _list(schema, key):
                value = self._one_of(value, branches, loose, refs)
        self._member(value, schema)
        if isinstance(value, dict):
            return self._object(value, schema, loose)
        return self._array(value, schema, loose) if isinstance(value, list) else value

    def _one_of(self, value: Any, branches: list, loose: bool, refs: tuple[str, ...]) -> Any:
        # As it is before converted: "5" of string or integer stays a string.
        for way in (False, True) if loose else (False,):
            for branch in branches:
                try:
                    return self.value(value, branch, way, refs)
                except Unfit:
                    if self._steps > _STEPS:
                        raise
        raise Unfit("no branch fits")

    def _types(self, value: Any, schema: Mapping, loose: bool) -> Any:
        types = _types(schema)
        if types is None or _has_type(value, types):
            return int(value) if _is_whole(value) and types is not None and "integer" in types and "number" not in types else value
        if loose and isinstance(value, str):
            for reading in _readings(value):
                if not isinstance(reading.value, str) and _has_type(reading.value, types):
                    return self._types(reading.value, schema, False)
        raise Unfit("of another type")

    def _member(self, value: Any, schema: Mapping) -> None:
        for key in ("enum", "const"):
            if key not in schema:
                continue
            members = schema[key] if key == "enum" and isinstance(schema[key], list) else [schema[key]]
            if self._members and not any(_same(value, member) for member in members):
                raise Unfit("not a member")
            if "type" not in schema and not _has_type(value, {_type(member) for member in members}):
                raise Unfit("not of a member's type")

    def _object(self, value: dict, schema: Mapping, loose: bool) -> dict:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties", True)
        others = others if isinstance(others, Mapping) else True  # a key too many is the tool's to refuse
        return {key: self.value(item, properties.get(key, others), loose) for key, item in value.items()}

    def _array(self, value: list, schema: Mapping, loose: bool) -> list:
        first, rest = _list(schema, "prefixItems"), schema.get("items", True)
        if isinstance(rest, list):  # the older spelling of prefixItems
            first, rest = rest, schema.get("additionalItems", True)
        rest = rest if isinstance(rest, Mapping) else True
        return [self.value(item, first[i] if i < len(first) else rest, loose) for i, item in enumerate(value)]


def _list(schema: Mapping, key: str) -> list:
    return schema[key] if isinstance(schema.get(key), list) else []


def _types(schema: Mapping) -> set[str] | None:
    """The types a schema names itself; None if it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if not isinstance(named, list) or not named:
        return None
    return {*filter(lambda name: isinstance(name, str), named), *(["null"] if schema.get("nullable") is True else [])}


def _type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "object")


def _has_type(value: object, types: set[str]) -> bool:
    kind = _type(value)
    return kind in types or (kind == "number" and "integer" in types and (isinstance(value, int) or _is_whole(value)))


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**63


def _same(value: object, member: object) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(value, bool) or isinstance(member, bool):
        return value is member
    if isinstance(value, list) and isinstance(member, list | tuple):
        return len(value) == len(member) and all(map(_same, value, member))
    if isinstance(value, dict) and isinstance(member, Mapping):
        return value.keys() == member.keys() and all(_same(value[key], member[key]) for key in value)
    return value == member
