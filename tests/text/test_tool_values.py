"""Values of tool parameters by JSON schema."""

import pytest

from ninfer_jax.text.tools import Unfit, typed
from ninfer_jax.text.tools.values import parameter_names, parameter_schema

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
STRINGS = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
CITY = {
    "$defs": {"City": {"type": "object", "properties": {"zip": {"type": "integer"}}}},
    "properties": {"c": {"$ref": "#/$defs/City"}},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, " false\n", False),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "+5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, '"7"', 7),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "", ""),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "nullify", "nullify"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "+12", "+12"),
        (NULLABLE, "null", None),
        (NULLABLE, "12", 12),
        (STRINGS, "['a', 'b']", ["a", "b"]),
        (STRINGS, '["a"]', ["a"]),
        (STRINGS, "None", None),
        ({"type": "array", "items": {"type": "integer"}}, '["1", 2.0]', [1, 2]),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "boolean"}}, '["1", "true"]', ["1", True]),
        ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}}, "{'a': True, 'b': None}", {"a": True, "b": None}),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"a": "1"}', {"a": "1"}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a"]}, '"a"', "a"),
        ({"enum": ["a", None]}, "b", "b"),
        ({"const": True}, "True", True),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "5", "5"),
        ({}, "text", "text"),
        ({}, '"quoted"', '"quoted"'),
        ({}, "5", 5),
        ({}, "(1, 2)", "(1, 2)"),
        ({}, '{"a": [1]}', {"a": [1]}),
        (True, "5", 5),
        ({}, "NaN", "NaN"),
        ({}, '"\\ud800"', '"\\ud800"'),
        ({}, "1" * 5000, "1" * 5000),
        ({}, "[" * 5000, "[" * 5000),
        ({}, "[" * 200 + "]" * 200, "[" * 200 + "]" * 200),
        ({"type": "string", "$ref": "#/nowhere"}, "a", Unfit),
        ({"$ref": "#"}, "a", Unfit),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "a", Unfit),
        ({"type": "integer"}, "five", Unfit),
        ({"type": "integer"}, "5.5", Unfit),
        ({"type": "integer"}, "True", Unfit),
        ({"type": "boolean"}, "1", Unfit),
        ({"type": "number"}, "NaN", Unfit),
        ({"type": "number"}, "1e999", Unfit),
        ({"type": "number"}, "\u0665", Unfit),
        ({"type": "array", "items": {"type": "integer"}}, '["a"]', Unfit),
        ({"type": "object"}, '{"a": 1, "a": 2}', Unfit),
        ({"type": "object"}, "__import__('os')", Unfit),
        ({"enum": [1]}, "a", Unfit),
        (False, "5", Unfit),
    ],
)
def test_types_follow_the_schema(schema: object, text: str, value: object):
    if value is Unfit:
        with pytest.raises(Unfit):
            typed(text, schema)
    else:
        found = typed(text, schema)
        assert found == value and type(found) is type(value)


def test_a_schema_is_found_wherever_the_tool_has_it():
    schema = parameter_schema(CITY, "c")
    assert typed("{'zip': '12345'}", schema, CITY) == {"zip": 12345}
    assert parameter_schema({"additionalProperties": {"type": "integer"}}, "n") == {"type": "integer"}
    assert parameter_schema({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"n": {"type": "null"}}}}}, "n") == {
        "type": "null"
    }
    assert parameter_schema({"anyOf": [{"properties": {"n": {"type": "null"}}}, {"properties": {"n": {}}}]}, "n") == {
        "anyOf": [{"type": "null"}, {}]
    }
    assert parameter_schema({"$ref": "#"}, "n") == parameter_schema(None, "n") == parameter_schema({"properties": []}, "n") == {}
    assert parameter_names({"properties": {"a": {}}, "oneOf": [{"properties": {"b": {}}}]}) == {"a", "b"}


def test_schemas_that_double_end():
    doubling = {
        "$defs": {f"T{i}": {"anyOf": [{"$ref": f"#/$defs/T{i + 1}"}] * 2} for i in range(60)} | {"T60": {"type": "null"}},
        "$ref": "#/$defs/T0",
    }
    with pytest.raises(Unfit):
        typed("text", doubling)
