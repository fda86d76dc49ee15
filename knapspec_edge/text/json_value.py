"""Whether a value keeps to a JSON schema: for those that a schema lists, beside other keywords.

Knows what json_schema turns into grammars. What neither can say is taken to be kept to; the
conversion names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

Resolve = Callable[[object], object]  # the schema that a "$ref" stands for


def same(first: object, second: object) -> bool:
    """Equality of JSON values: 1 is 1.0, and neither is true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return first == second


def keeps_to(value: object, schema: object, resolve: Resolve) -> bool:
    """Raises what `resolve` raises, and RecursionError for a schema that leads to itself."""
    if not isinstance(schema, Mapping):
        return schema is not False

    def fits(part: object) -> bool:
        return keeps_to(value, part, resolve)

    checks: dict[str, Callable[[Any], bool]] = {
        "$ref": lambda reference: fits(resolve(reference)),
        "const": lambda constant: same(value, constant),
        "enum": lambda values: any(same(value, other) for other in values),
        "allOf": lambda parts: all(map(fits, parts)),
        "anyOf": lambda parts: any(map(fits, parts)),
        "oneOf": lambda parts: any(map(fits, parts)),
        "type": lambda kinds: any(
            _is_a(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
        ),
    }
    if not all(check(schema[key]) for key, check in checks.items() if key in schema):
        return False
    if isinstance(value, str):
        return _string_keeps(value, schema)
    if isinstance(value, list):
        return _array_keeps(value, schema, resolve)
    if isinstance(value, Mapping):
        return _object_keeps(value, schema, resolve)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_keeps(value, schema)
    return True


def _is_a(value: object, kind: object) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types: dict[str, Any] = {
        "object": Mapping, "array": list, "string": str, "number": (int, float), "null": type(None),
    }  # fmt: skip
    return isinstance(value, types.get(str(kind), ()))


def _string_keeps(value: str, schema: Mapping[str, Any]) -> bool:
    if not _counts(len(value), schema, "minLength", "maxLength"):
        return False
    try:
        return "pattern" not in schema or re.search(schema["pattern"], value) is not None
    except (re.error, TypeError, OverflowError):
        return True


def _number_keeps(value: float, schema: Mapping[str, Any]) -> bool:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # in old drafts, a flag that belongs to minimum or maximum
    above, below = low if above is True else above, high if below is True else below
    return (
        (not is_number(low) or value >= low)
        and (not is_number(high) or value <= high)
        and (not is_number(above) or value > above)
        and (not is_number(below) or value < below)
    )


def _array_keeps(value: list[Any], schema: Mapping[str, Any], resolve: Resolve) -> bool:
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(items, list):
        prefix, items = items, schema.get("additionalItems", True)
    prefix = prefix if isinstance(prefix, list) else []
    schemas = [*prefix[: len(value)], *[items] * (len(value) - len(prefix))]
    return _counts(len(value), schema, "minItems", "maxItems") and all(
        keeps_to(item, part, resolve) for item, part in zip(value, schemas, strict=True)
    )


def _object_keeps(value: Mapping[str, Any], schema: Mapping[str, Any], resolve: Resolve) -> bool:
    properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required", [])
    return all(name in value for name in (required if isinstance(required, list) else [])) and all(
        keeps_to(item, properties.get(name, extra), resolve) for name, item in value.items()
    )


def _counts(n: int, schema: Mapping[str, Any], low_key: str, high_key: str) -> bool:
    low, high = schema.get(low_key), schema.get(high_key)
    return (not is_number(low) or n >= low) and (not is_number(high) or n <= high)


def is_number(value: object) -> TypeGuard[float]:
    """Whether JSON has it as a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
