"""JSON schemas of every kind that grammars can hold to, and whether a text keeps to one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": ["string", "null"], "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", 'q"b', "back\\slash", "é🎉", "n\nl"]}},
    },
    "required": ["name", "tags"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": 0},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "anything": {},
    "described": {"title": "T", "description": "anything at all", "default": 3},
    "object": {"type": "object"},
    "list": {"type": "array"},
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "person": PERSON,
    "tree": TREE,
    "all optional": {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
    "nothing within": {"type": "object", "properties": {}, "additionalProperties": False},
    "required without a schema": {"type": "object", "required": ["a"]},
    "others of a type": {
        "properties": {"ab": {"type": "null"}, "abc": {"type": "null"}, "": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    },
    "any others": {"properties": {"x": {"type": "null"}}, "additionalProperties": True},
    "a map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "union": {"anyOf": [{"type": "integer", "maximum": -5}, {"enum": ["x", None]}]},
    "union beside properties": {
        "properties": {"kind": {"type": "string"}},
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["n"]},
            {"properties": {"kind": {"const": "b"}}},
        ],
    },
    "all of": {
        "allOf": [
            {"$ref": "#/$defs/base"},
            {"properties": {"b": {"type": "integer", "minimum": 3}}, "required": ["b"]},
            {"properties": {"b": {"type": "integer", "maximum": 5}}},
        ],
        "$defs": {"base": {"properties": {"a": {"type": "null"}}, "required": ["a"]}},
    },
    "all of one, no object": {"allOf": [{"$ref": "#/$defs/e"}], "$defs": {"e": {"enum": ["x"]}}},
    "reference beside a keyword": {
        "$ref": "#/$defs/s",
        "maxLength": 3,
        "$defs": {"s": {"type": "string", "minLength": 2}},
    },
    "counted": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "at least": {"type": "array", "items": {"type": "null"}, "minItems": 3},
    "empty list": {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]},
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"const": 2},
        "minItems": 3,
        "maxItems": 4,
    },
    "long string": {"type": "string", "minLength": 4, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "date-time": {"type": "string", "format": "date-time"},
    "phone": {"type": "string", "pattern": r"^\+?\d{2,4}([- ]\d{3})+$"},
    "unanchored": {"type": "string", "pattern": "b[^a]"},
    "quoted": {"type": "string", "pattern": '^["\\\\]{2}\\s.$'},
    "either end": {"type": "string", "pattern": "^a|b$"},
    "pointer escapes": {
        "$ref": "#/$defs/a~1b~0c%20d",
        "$defs": {"a/b~c d": {"type": "boolean"}},
    },
    "of the same name": {
        "properties": {
            "item": {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"]},
            "other": {"$ref": "#/$defs/item"},
            "root": {"type": "integer"},
            "value": {"type": "boolean"},
        },
        "required": ["item", "other", "root", "value"],
        "$defs": {"item": {"type": "array", "items": {"type": "integer"}}},
    },
    "a list of types and an enum": {"type": ["string", "null"], "enum": ["x", None]},
    "old exclusive bounds": {
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 6,
        "exclusiveMaximum": True,
    },  # fmt: skip
    "odd names": {
        "properties": {'q"uote': {"const": 1}, "back\\slash": {"const": 2}, "日本": {"const": 3}},
        "required": ['q"uote', "back\\slash", "日本"],
    },
}


def check(schema: Any, text: str) -> None:
    """Raises ValueError for text that is no JSON, ValidationError for what breaks the schema."""
    # of old drafts, which the validator reads by another dialect
    old = isinstance(schema, dict) and schema.get("exclusiveMinimum") is True
    kind = jsonschema.Draft4Validator if old else jsonschema.Draft202012Validator
    kind(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
