"""From a JSON schema to a GBNF grammar whose every text is valid JSON and keeps to the schema.

Objects have their properties in the order of the schema and, unless additionalProperties says
otherwise, no others. Between two tokens of JSON one space at most, so that no model can run away in
white space. oneOf is taken as anyOf. What a grammar cannot express (or not within reason) is left
out and named in `unenforced`.

The converter of the bindings is not used: strings of its grammars may hold raw newlines, constants
with quotation marks or backslashes come out broken, a reference may end at a property of the same
name, and a list of types drops all other keywords.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ..errors import UsageError
from .json_pattern import (
    MAX_REPETITIONS,
    Inexpressible,
    literal,
    pattern_grammar,
    plain_class,
)
from .json_value import is_number, keeps_to, same

Schema = Mapping[str, Any] | bool

_MAX_DIGITS = 15  # of an integer; every double holds those exactly

# Rules that grammars share, with those that they need.
_BUILTIN: dict[str, tuple[str, tuple[str, ...]]] = {
    "space": ('" "?', ()),
    "char": (
        # no halves of surrogate pairs: two of them are one character, and one is none
        r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | '
        r'"u" ([0-9a-ce-fA-CE-F] [0-9a-fA-F] | [dD] [0-7]) [0-9a-fA-F] [0-9a-fA-F])',
        (),
    ),
    "string": (r'"\"" char* "\""', ("char",)),
    # any but a newline, as a regular expression's dot
    "dot": (r'[^"\\\x00-\x1F\x7F] | "\\" ["\\/bft]', ()),
    "boolean": ('"true" | "false"', ()),
    "null": ('"null"', ()),
    "whole": (f'"0" | [1-9] [0-9]{{0,{_MAX_DIGITS - 1}}}', ()),
    "integer": ('"-"? whole', ("whole",)),
    "positive-number": (
        f'whole ("." [0-9]{{1,{_MAX_DIGITS}}})? ([eE] [-+]? [0-9] [0-9]?)?',
        ("whole",),
    ),
    "number": ('"-"? positive-number', ("positive-number",)),
    "value": (
        "object | array | string | number | boolean | null",
        ("object", "array", "string", "number", "boolean", "null"),
    ),
    "pair": ('string ":" space value', ("string", "space", "value")),
    "object": ('"{" space (pair ("," space pair)* space)? "}"', ("pair", "space")),
    "array": ('"[" space (value ("," space value)* space)? "]"', ("value", "space")),
    "date": (
        '[1-9] [0-9]{3} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01]) | '
        '("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | '
        '"02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])) | leap-year "-02-29"',
        ("leap-year",),
    ),
    "leap-year": (
        '[1-9] [0-9] ("0" [48] | [2468] [048] | [13579] [26]) | ([2468] [048] | [13579] [26]) "00"',
        (),
    ),
    "time": (
        '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9] [0-9] [0-9])? '
        '("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
        (),
    ),
    "hex": ("[0-9a-fA-F]", ()),
    "date-string": (r'"\"" date "\""', ("date",)),
    "time-string": (r'"\"" time "\""', ("time",)),
    "date-time-string": (r'"\"" date "T" time "\""', ("date", "time")),
    "uuid-string": (
        r'"\"" hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12} "\""',
        ("hex",),
    ),
}
_FORMATS = ("date", "time", "date-time", "uuid")

# Keywords by the type they speak about.
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_COMBINING = ("$ref", "const", "enum", "allOf", "anyOf", "oneOf", "type")
_KNOWN = {*_COMBINING, *(word for words in _KEYWORDS.values() for word in words)}
# Constraints that are told of instead, with the values that ask for nothing.
_UNENFORCED: dict[str, tuple[object, ...]] = {
    "multipleOf": (),
    "uniqueItems": (False,),
    "contains": (True, {}),
    "minContains": (0,),
    "maxContains": (),
    "minProperties": (0,),
    "maxProperties": (),
    "patternProperties": ({},),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, False, {}),
    "unevaluatedItems": (True, False, {}),
    "not": (False,),
    "if": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


class _Place(tuple[str, ...]):
    """Where in the answer a schema applies: names of properties, for rule names and messages."""

    def __truediv__(self, name: object) -> _Place:
        return _Place((*self, str(name)))

    def __str__(self) -> str:
        return ".".join(self[1:]) or "the answer"

    @property
    def rule(self) -> str:
        return "-".join(re.sub("[^a-zA-Z0-9]+", "-", name) for name in self)


def convert(schema: Schema) -> tuple[str, tuple[str, ...]]:
    """(GBNF with the root rule "root", keywords that it does not hold to).

    Raises UsageError, one line, for what is no schema, cannot be satisfied, or refers to what is
    not within it. Nothing is ever fetched.
    """
    converter = _Converter(schema)
    try:
        converter.rules["root"] = converter.term(schema, _Place(("answer",)))
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    return converter.text(), tuple(converter.unenforced)


class _Converter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self.rules: dict[str, str] = {"root": ""}
        self.unenforced: dict[str, None] = {}  # in order of appearance
        self._references: dict[str, str] = {}  # "#/..." -> name of its rule

    def text(self) -> str:
        return "".join(f"{name} ::= {body}\n" for name, body in self.rules.items())

    # -- rules

    def rule(self, name: str, body: str) -> str:
        """A new rule; the name it got."""
        if re.fullmatch("[a-zA-Z0-9-]+", body):
            return body  # is one already
        found, n = name, 2
        while found in self.rules or found in _BUILTIN:
            found, n = f"{name}-{n}", n + 1
        self.rules[found] = body
        return found

    def builtin(self, name: str) -> str:
        if name not in self.rules:
            self.rules[name], needed = _BUILTIN[name]
            for other in needed:
                self.builtin(other)
        return name

    # -- any schema

    def term(self, schema: object, place: _Place, chain: tuple[str, ...] = ()) -> str:
        """The name of a rule for values of this schema.

        `chain`: the references followed since the last opening bracket.
        """
        if schema is True:
            return self.builtin("value")
        if schema is False:
            raise UsageError(f"the JSON schema allows no value at all for {place}")
        if not isinstance(schema, Mapping):
            raise UsageError(
                f"the JSON schema has {_short(schema)} for {place}; a schema is an object, true or "
                "false"
            )
        self._note_unenforced(schema)
        known = {key: value for key, value in schema.items() if key in _KNOWN}
        if not known:
            return self.builtin("value")
        for key in ("allOf", "anyOf", "oneOf"):
            if key in known and not (isinstance(known[key], list) and known[key]):
                raise UsageError(f"the JSON schema has {key} of {place} without a list of schemas")
        if "$ref" in known:
            return self._reference(known, place, chain)
        values = self._values(known, place)
        if values is not None:
            if not values:
                return self.term(False, place)
            return self.rule(place.rule, " | ".join(map(self._literal, values)))
        if "allOf" in known:
            return self._all_of(known, place, chain)
        for key in ("anyOf", "oneOf"):
            if key in known:
                rest = {k: v for k, v in known.items() if k != key}
                # without `rest` they may be references of their own, which recursion needs
                parts = [_merge(rest, part, place) if rest else part for part in known[key]]
                return self._union(parts, place, chain)
        return self._typed(known, place, chain)

    def _values(self, schema: Mapping[str, Any], place: _Place) -> list[Any] | None:
        """The listed values that keep to the rest of the schema; None where none are listed."""
        if "const" not in schema and "enum" not in schema:
            return None
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not isinstance(schema.get("enum", []), list):
            values = []
        if not values or not schema.get("enum", [None]):
            raise UsageError(f"the JSON schema has an enum of {place} without values")
        if "format" in schema:
            self._note(f"format {_short(schema['format'])}")
        return [v for v in values if keeps_to(v, schema, lambda r: self._target(r, place))]

    def _typed(self, schema: dict[str, Any], place: _Place, chain: tuple[str, ...]) -> str:
        kind = schema.get("type")
        if kind is None:  # what the keywords speak about
            kind = next(k for k, words in _KEYWORDS.items() if any(w in schema for w in words))
            kind = "number" if kind == "integer" else kind
        if isinstance(kind, list) and kind:
            if len(kind) > 1:
                return self._union([{**schema, "type": k} for k in kind], place, chain)
            (kind,) = kind
        if kind not in _TYPES:
            raise UsageError(
                f"the JSON schema has the type {_short(kind)} for {place}; there are "
                f"{', '.join(_TYPES)}"
            )
        special: dict[str, Callable[[dict[str, Any], _Place], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        return special[kind](schema, place) if kind in special else self.builtin(kind)

    def _union(self, parts: Sequence[object], place: _Place, chain: tuple[str, ...]) -> str:
        possible = [
            part
            for part in parts
            if part is not False
            and not (
                isinstance(part, Mapping) and "$ref" not in part and self._values(part, place) == []
            )
        ]
        if not possible:
            return self.term(False, place)
        names = [self.term(part, place / i, chain) for i, part in enumerate(possible, 1)]
        return self.rule(place.rule, " | ".join(dict.fromkeys(names)))

    def _all_of(self, schema: dict[str, Any], place: _Place, chain: tuple[str, ...]) -> str:
        parts = schema["allOf"]
        rest = {k: v for k, v in schema.items() if k != "allOf"}
        if len(parts) == 1 and not rest:
            return self.term(parts[0], place, chain)
        merged: object = rest
        for part in parts:
            while isinstance(part, Mapping) and "$ref" in part:
                part, chain = self._resolved(part, place, chain)
            merged = _merge(merged, part, place)
        return self.term(merged, place, chain)

    def _reference(self, schema: dict[str, Any], place: _Place, chain: tuple[str, ...]) -> str:
        if len(schema) > 1:  # further keywords beside it: not the referenced rule itself
            merged, chain = self._resolved(schema, place, chain)
            return self.term(merged, place, chain)
        reference = schema["$ref"]
        target = self._target(reference, place)
        if reference in chain:
            raise UsageError(f"the JSON schema's reference {_short(reference)} leads to itself")
        if reference not in self._references:
            tail = reference.rpartition("/")[2].strip("#") or "root"
            inner = _Place(("the", tail))
            name = self.rule(inner.rule, "(recursive)")
            self._references[reference] = name
            body = self.term(target, inner, (*chain, reference))
            self.rules[name] = body
        return self._references[reference]

    def _resolved(
        self, schema: Mapping[str, Any], place: _Place, chain: tuple[str, ...]
    ) -> tuple[object, tuple[str, ...]]:
        """The schema with its reference replaced by what that refers to."""
        reference = schema["$ref"]
        target = self._target(reference, place)
        if reference in chain:
            raise UsageError(f"the JSON schema's reference {_short(reference)} leads to itself")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _merge(target, rest, place), (*chain, reference)

    def _target(self, reference: object, place: _Place) -> object:
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            raise UsageError(
                f"the JSON schema refers to {_short(reference)}; only references within it, such "
                'as "#/$defs/name", are followed'
            )
        target: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise UsageError(
                    f"the JSON schema refers to {_short(reference)}, which is not in it"
                )
        return target

    # -- one type

    def _object(self, schema: dict[str, Any], place: _Place) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError(f"the JSON schema has malformed properties for {place}")
        extra = schema.get("additionalProperties", not properties and not required)
        wanted = dict(properties)
        for name in required:
            if not isinstance(name, str):
                raise UsageError(f"the JSON schema requires {_short(name)}, which is no name")
            # nothing is said about it, unless others are spoken of
            wanted.setdefault(name, extra if "additionalProperties" in schema else True)
        wanted = {k: v for k, v in wanted.items() if v is not False or k in required}
        if not wanted and extra is True:
            return self.builtin("object")

        space = self.builtin("space")
        pairs = [
            self.rule(
                f"{(place / name).rule}-pair",
                f'{self._literal(name)} ":" {space} {self.term(value, place / name)}',
            )
            for name, value in wanted.items()
        ]
        other = others = ""
        if extra is not False:
            key = self._other_key(list(wanted), place)
            value = self.term(extra, place / "others")
            other = self.rule(f"{place.rule}-other", f'{key} ":" {space} {value}')
            others = f'("," {space} {other})*'

        # rest[i]: what may follow once something stands before property i
        rest = [others]
        for name, pair in reversed(list(zip(wanted, pairs, strict=True))):
            following = f'"," {space} {pair}' if name in required else f'("," {space} {pair})?'
            body = f"{following} {rest[0]}".strip()
            rest.insert(0, self.rule(f"{place.rule}-rest", body))
        # the first that is there has no comma; it is the first required one or an optional before
        firsts = []
        for i, (name, pair) in enumerate(zip(wanted, pairs, strict=True)):
            firsts.append(f"{pair} {rest[i + 1]}".strip())
            if name in required:
                break
        else:
            if other:
                firsts.append(f"{other} {others}")
        content = f"({' | '.join(firsts)}) {space}" if firsts else ""
        if content and not any(name in required for name in wanted):
            content = f"({content})?"
        return self.rule(place.rule, f'"{{" {space} {content} "}}"')

    def _other_key(self, names: list[str], place: _Place) -> str:
        """A rule for keys that are none of these. Begins without an escape, which could spell one
        of the names in another way."""
        if not names:
            return self.builtin("string")
        char = self.builtin("char")

        def differing(ends: Sequence[str]) -> str:
            firsts = sorted({end[0] for end in ends if end})
            options = [
                f"{literal(first)} {differing([end[1:] for end in ends if end[:1] == first])}"
                for first in firsts
                if first.isprintable() and first not in '"\\'
            ]
            options.append(f"{plain_class([(ord(c), ord(c)) for c in firsts])} {char}*")
            if "" not in ends:
                options.append('""')
            return f"({' | '.join(options)})"

        body = f'"\\"" {differing(names)} "\\""'
        return self.rule(f"{place.rule}-other-key", body)

    def _array(self, schema: dict[str, Any], place: _Place) -> str:
        prefix, items = schema.get("prefixItems", []), schema.get("items")
        if isinstance(items, list):  # how drafts before 2020 said it
            prefix, items = items, schema.get("additionalItems")
        if not isinstance(prefix, list):
            raise UsageError(f"the JSON schema has prefixItems of {place} without a list")
        low, high = self._counts(schema, "minItems", "maxItems", place)
        fixed = prefix if high is None else prefix[:high]
        if items is None:
            items = not prefix or low > len(prefix)
        if items is False:
            if low > len(fixed):
                raise UsageError(f"the JSON schema asks for {low} items of {place} and allows less")
            high = len(fixed)
        low = max(0, low - len(fixed))
        high = None if high is None else high - len(fixed)

        space = self.builtin("space")
        fixed_terms = [self.term(part, place / i) for i, part in enumerate(fixed)]
        content = f' "," {space} '.join(fixed_terms)
        if high != 0:
            item = self.term(items, place / "item")
            following = self.rule(f"{(place / 'item').rule}-next", f'"," {space} {item}')
            if fixed_terms:
                content += f" {self._repeat(following, low, high)}"
            else:
                fewer = None if high is None else high - 1
                content = f"{item} {self._repeat(following, max(0, low - 1), fewer)}"
        if content:
            content += f" {space}"
            if not fixed_terms and low == 0:
                content = f"({content})?"
        return self.rule(place.rule, f'"[" {space} {content} "]"')

    def _string(self, schema: dict[str, Any], place: _Place) -> str:
        low, high = self._counts(schema, "minLength", "maxLength", place)
        form, pattern = schema.get("format"), schema.get("pattern")
        lengths = [key for key in ("minLength", "maxLength") if key in schema]
        if pattern is not None:
            try:
                body = pattern_grammar(
                    pattern, self.builtin, lambda body: self.rule(f"{place.rule}-part", body)
                )
            except Inexpressible:
                self._note(f"pattern {_short(pattern)}")
            else:
                self._note(*lengths, *(() if form is None else (f"format {_short(form)}",)))
                return self.rule(place.rule, f'"\\"" {body} "\\""')
        if form in _FORMATS:
            self._note(*lengths)
            return self.builtin(f"{form}-string")
        if form is not None:
            self._note(f"format {_short(form)}")
        if low == 0 and high is None:
            return self.builtin("string")
        char = self.builtin("char")
        return self.rule(place.rule, f'"\\"" {self._repeat(char, low, high)} "\\""')

    def _integer(self, schema: dict[str, Any], place: _Place) -> str:
        low, high = _bounds(schema, place)
        if low == -math.inf and high == math.inf:
            return self.builtin("integer")
        most = 10**_MAX_DIGITS - 1
        first = math.ceil(max(low, -most))
        last = math.floor(min(high, most))
        if first > last:
            raise UsageError(f"the JSON schema allows no integer for {place}")
        return self.rule(place.rule, " | ".join(_integers(first, last)))

    def _number(self, schema: dict[str, Any], place: _Place) -> str:
        _bounds(schema, place)  # checks them
        lows = (schema.get(key) for key in ("minimum", "exclusiveMinimum"))
        positive = any(is_number(n) and n >= 0 for n in lows)
        # of bounds, a grammar easily keeps to the sign alone
        kept = ["minimum"] if schema.get("minimum") == 0 else []
        self._note(*(k for k in _KEYWORDS["integer"] if k in schema and k not in kept))
        return self.builtin("positive-number" if positive else "number")

    # -- helpers

    def _literal(self, value: object) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, TypeError):
            raise UsageError(f"the JSON schema has {_short(value)}, which is no JSON") from None
        return literal(text)

    def _counts(
        self, schema: dict[str, Any], low_key: str, high_key: str, place: _Place
    ) -> tuple[int, int | None]:
        """Bounds of a length, within what a grammar can count."""
        low, high = schema.get(low_key, 0), schema.get(high_key)
        for key, value in ((low_key, low), (high_key, high)):
            if value is not None and not (is_number(value) and value >= 0 and value % 1 == 0):
                raise UsageError(f"the JSON schema has {_short(value)} as {key} of {place}")
        if high is not None and low > high:
            raise UsageError(f"the JSON schema has {low_key} above {high_key} for {place}")
        if low > MAX_REPETITIONS:
            self._note(low_key)
        if high is not None and high > MAX_REPETITIONS:
            self._note(high_key)
            high = None
        return min(int(low), MAX_REPETITIONS), None if high is None else int(high)

    def _repeat(self, name: str, low: int, high: int | None) -> str:
        if (low, high) in ((0, None), (1, None)):
            return name + "*+"[low]
        if high is None:
            return f"{name}{{{low},}}"
        if high == 0:
            return '""'
        return f"{name}{{{low},{high}}}"

    def _note_unenforced(self, schema: Mapping[str, Any]) -> None:
        for key, harmless in _UNENFORCED.items():
            if key in schema and not any(
                schema[key] is h if isinstance(h, bool) else schema[key] == h for h in harmless
            ):
                self._note(key)

    def _note(self, *keywords: str) -> None:
        self.unenforced.update(dict.fromkeys(keywords))


def _merge(first: object, second: object, place: _Place) -> object:
    """One schema that asks for what both ask for. Raises UsageError where there is no such."""
    if first is False or second is False:
        return False
    if first is True or second is True:
        return second if first is True else first
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        raise UsageError(f"the JSON schema combines what are no schemas for {place}")
    merged = dict(first)
    for key, value in second.items():
        known = key in _KNOWN or key in _UNENFORCED
        if key not in merged or same(merged[key], value) or not known:
            merged.setdefault(key, value)
            continue
        old = merged[key]
        if key == "properties" and isinstance(old, Mapping) and isinstance(value, Mapping):
            shared = {k: {"allOf": [old[k], v]} for k, v in value.items() if k in old}
            merged[key] = {**old, **value, **shared}
        elif key == "required" and isinstance(old, list) and isinstance(value, list):
            merged[key] = [*old, *(name for name in value if name not in old)]
        elif key in ("additionalProperties", "items") and not isinstance(old, list):
            if False in (old, value):
                merged[key] = False
            elif True in (old, value):
                merged[key] = value if old is True else old
            else:
                merged[key] = {"allOf": [old, value]}
        elif key == "allOf" and isinstance(old, list) and isinstance(value, list):
            merged[key] = [*old, *value]
        elif key in (*_LARGER, *_SMALLER) and is_number(old) and is_number(value):
            merged[key] = max(old, value) if key in _LARGER else min(old, value)
        elif key == "type":
            merged[key] = _common_types(old, value)
            if not merged[key]:
                return False
        elif key == "enum" and isinstance(old, list) and isinstance(value, list):
            merged[key] = [v for v in old if any(same(v, other) for other in value)]
            if not merged[key]:
                return False
        else:
            raise UsageError(
                f"the JSON schema asks for two different {key} of {place} at once, which is not "
                "supported"
            )
    return merged


def _common_types(first: object, second: object) -> list[Any]:
    one, two = (kind if isinstance(kind, list) else [kind] for kind in (first, second))
    common = [kind for kind in one if kind in two]
    among = ("integer" in one and "number" in two) or ("number" in one and "integer" in two)
    if among and "integer" not in common:
        common.append("integer")
    return common


def _bounds(schema: dict[str, Any], place: _Place) -> tuple[float, float]:
    """Smallest and largest number; exclusive bounds as for integers."""
    for key in _KEYWORDS["integer"]:
        # in old drafts, a flag that belongs to minimum or maximum
        if key in schema and not is_number(schema[key]) and not isinstance(schema[key], bool):
            raise UsageError(f"the JSON schema has {_short(schema[key])} as {key} of {place}")
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is True:
        above = low
    if below is True:
        below = high
    if is_number(above):
        low = max(low, math.floor(above) + 1 if math.isfinite(above) else above)
    if is_number(below):
        high = min(high, math.ceil(below) - 1 if math.isfinite(below) else below)
    return low, high


def _integers(first: int, last: int) -> Iterator[str]:
    """Alternatives of GBNF for the integers first..last, without leading zeros."""
    if first < 0:
        for option in _integers(max(1, -last), -first):
            yield f'"-" {option}'
        first = 0
    for n_digits in range(len(str(first)), len(str(max(last, 0))) + 1):
        low = max(first, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        high = min(last, 10**n_digits - 1)
        if low <= high:
            yield from _digits(str(low), str(high))


def _digits(low: str, high: str) -> list[str]:
    """Alternatives for the numbers low..high, all of the same length."""

    def one(first: int, last: int) -> str:
        return f'"{first}"' if first == last else f"[{first}-{last}]"

    n, a, b = len(low) - 1, int(low[0]), int(high[0])
    if n == 0:
        return [one(a, b)]
    if a == b:
        return [f"{one(a, a)} {rest}" for rest in _digits(low[1:], high[1:])]
    below, above = [], []
    if low[1:] != "0" * n:
        below = [f"{one(a, a)} {rest}" for rest in _digits(low[1:], "9" * n)]
        a += 1
    if high[1:] != "9" * n:
        above = [f"{one(b, b)} {rest}" for rest in _digits("0" * n, high[1:])]
        b -= 1
    within = [f"{one(a, b)} [0-9]{{{n}}}"] if a <= b else []
    return [*below, *within, *above]


def _short(value: object) -> str:
    """A value for a message."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
