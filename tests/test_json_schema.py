"""JSON schemas as grammars: whatever a grammar makes is JSON and keeps to the schema (case 43)."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from naive_gbnf import Grammar
from sample_schemas import PERSON, SCHEMAS, check

from knapspec_edge.errors import UsageError
from knapspec_edge.text.grammar import check_grammar, grammar_of_schema, read_grammar, read_schema
from knapspec_edge.text.json_pattern import Inexpressible, pattern_grammar


def grammar(schema: Any) -> Grammar:
    return Grammar.parse(grammar_of_schema(schema)[0])


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_grammar_makes_keeps_to_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    text, unenforced = grammar_of_schema(schema)
    assert unenforced == ()
    made = Grammar.parse(text)
    rng = random.Random(name)
    seen = set()
    for _ in range(60):
        answer = made.sample(rng)
        seen.add(answer)
        assert made.matches(answer)
        check(schema, answer)
        assert "\n" not in answer
    assert seen


GOOD_AND_BAD: list[tuple[Any, list[str], list[str]]] = [
    (
        PERSON,
        [
            '{"name": "Bob", "tags": []}',
            '{"name":"","age":130,"email":null,"tags":["é🎉","a"]}',
            '{ "name": "x", "age": 7, "tags": ["q\\"b"] }',
        ],
        [
            '{"name": "Bob"}',
            '{"tags": [], "name": "Bob"}',
            '{"name": "Bob", "age": 131, "tags": []}',
            '{"name": "Bob", "age": 007, "tags": []}',
            '{"name": "two\nlines", "tags": []}',
            '{"name": "Bob", "tags": [], "more": 1}',
            '{"name": "Bob",, "tags": []}',
            '{"name": "Bob", "tags": []} and so on',
            ' {"name": "Bob", "tags": []}',
        ],
    ),
    ({"type": "integer", "minimum": -12, "maximum": 5},
     [str(i) for i in range(-12, 6)], ["-13", "6", "", "-", "1.0", "1e1", "05"]),
    ({"type": "integer", "minimum": 8, "maximum": 1203},
     ["8", "9", "10", "99", "100", "999", "1000", "1199", "1203"], ["7", "1204", "2000", "12030"]),
    ({"type": "integer", "exclusiveMinimum": 9.5}, ["10", "123456789"], ["9", "0", "-20"]),
    ({"type": "number"}, ["0", "-1.5", "3e8", "1.25E-3"], [".5", "1.", "01", "NaN", "1e999"]),
    ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}'], ['{"a":[1]}', "{}"]),
    ({"pattern": "^(foo|ba[rz])$"}, ['"foo"', '"baz"'], ['"bax"', '"xfoo"', "foo"]),
    ({"pattern": "é+"}, ['"é"', '"caféé!"'], ['"e"', '""']),
    ({"type": "string", "format": "date"},
     ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"', '"2023-02-28"'],
     ['"2023-02-29"', '"1900-02-29"', '"1999-04-31"', '"1999-13-01"', '"1999-1-1"']),
    ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     ['{"a":null,"b":1}', '{"aa":1}', "{}"], ['{"a":1}', '{"\\u0061":1}', '{"b":null}']),
    (True, ["1", '[{"a": null}, "x", true]'], ["", "tru", "[1,]"]),
    # values keep to what stands beside them
    ({"type": "string", "enum": [1, "a", True]}, ['"a"'], ["1", "true"]),
    ({"minimum": 3, "enum": [1, 5, "x"]}, ["5", '"x"'], ["1"]),
    ({"enum": ["ab", "a", [], None], "maxLength": 1, "minItems": 1}, ['"a"', "null"],
     ['"ab"', "[]"]),
    ({"$ref": "#/$defs/s", "enum": ["a", "bb"], "$defs": {"s": {"pattern": "^b"}}}, ['"bb"'],
     ['"a"']),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [True, 2.0]}]}, ["2"], ["1", "true"]),
    ({"type": "integer", "anyOf": [{"enum": ["a"]}, {"enum": ["b", 7]}]}, ["7"], ['"a"', '"b"']),
    ({"allOf": [{"type": ["null", "string"]}, {"type": ["integer", "number", "null"]}]}, ["null"],
     ["3"]),
    # one character each, and no half of one
    ({"type": "string", "maxLength": 1}, ['"\\u00e9"', '"\\uE000"', '"\\ud7ff"', '"🎉"'],
     ['"\\ud83c\\udf89"', '"\\uDC00"']),
    ("json", ["{}", "3"], ["nothing"]),
    ("true", ["{}"], ["{"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), GOOD_AND_BAD)
def test_what_is_allowed_and_what_is_not(schema: Any, good: list[str], bad: list[str]) -> None:
    made = grammar(schema)
    assert [text for text in good if not made.matches(text)] == []
    assert [text for text in bad if made.matches(text)] == []


@pytest.mark.parametrize("seed", range(40))
def test_integer_bounds_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.randint(-1500, 1500)
    high = low + rng.choice([0, 1, 9, 10, 99, 345, 2000])
    made = grammar({"type": "integer", "minimum": low, "maximum": high})
    for n in {low - 1, low, high, high + 1, 0, *(rng.randint(-2500, 4000) for _ in range(60))}:
        assert made.matches(str(n)) == (low <= n <= high), n


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type":', "is no JSON: Expecting value in line 1, column 9"),
        ("[1]", "has to be an object"),
        ('"x"', "has to be an object"),
        ("3", "has to be an object"),
        ("", "is no JSON"),
        ('{"const": NaN}', "it has NaN"),
        ("false", "allows no value at all for the answer"),
        ({"type": "strng"}, 'has the type "strng" for the answer'),
        ({"type": []}, r"has the type \[\]"),
        ({"properties": {"a": {"properties": {"b": {"type": 3}}}}}, "type 3 for a.b"),
        ({"properties": []}, "malformed properties"),
        ({"properties": {"a": 3}}, "has 3 for a"),
        ({"required": "a"}, "malformed properties"),
        ({"required": [1]}, "requires 1"),
        ({"enum": []}, "enum of the answer without values"),
        ({"anyOf": []}, "anyOf of the answer without a list"),
        ({"anyOf": [False]}, "allows no value"),
        ({"$ref": "https://example.org/x.json"}, 'refers to "https://example.org/x.json"'),
        ({"$ref": "http://example.org/x.json"}, "only references within it"),
        ({"$ref": "other.json#/a"}, "only references within it"),
        ({"$ref": 3}, "refers to 3"),
        ({"$ref": "#/$defs/none"}, 'refers to "#/\\$defs/none", which is not in it'),
        ({"$ref": "#"}, 'reference "#" leads to itself'),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leads to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads to itself"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength above maxLength"),
        ({"type": "string", "maxLength": -1}, "-1 as maxLength"),
        ({"type": "array", "minItems": "2"}, '"2" as minItems'),
        ({"type": "array", "items": False, "minItems": 1}, "asks for 1 items"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer"),
        ({"type": "integer", "minimum": "a"}, '"a" as minimum'),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "allows no value"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different pattern"),
        ({"allOf": [{"enum": [1]}, {"enum": [2]}]}, "allows no value"),
        ({"type": "string", "const": 1}, "allows no value"),
        ({"type": "integer", "anyOf": [{"const": "a"}, {"enum": [1.5]}]}, "allows no value"),
        ({"const": 1, "allOf": [{"$ref": "#"}]}, "nested too deeply"),
        ({"const": "\ud800"}, "no JSON"),
        ({"const": {1, 2}}, "no JSON"),
        ({"type": "array", "prefixItems": {}}, "prefixItems"),
    ],
)  # fmt: skip
def test_what_is_no_usable_schema_is_one_line(schema: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        grammar_of_schema(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_schemas_too_deep_are_one_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested too deeply"):
        grammar_of_schema(deep)
    with pytest.raises(UsageError, match="nested too deeply"):
        grammar_of_schema('{"items":' * 200_000)
    endless = {"items": {"$ref": "#", "maxItems": 3}}
    with pytest.raises(UsageError, match="nested too deeply"):
        grammar_of_schema(endless)


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({"type": "integer", "multipleOf": 5}, ("multipleOf",)),
        ({"type": "number", "minimum": 2, "maximum": 3}, ("minimum", "maximum")),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"type": "object", "minProperties": 2}, ("minProperties",)),
        ({"type": "string", "format": "email"}, ('format "email"',)),
        ({"type": "string", "pattern": "(?=x)"}, ('pattern "(?=x)"',)),
        ({"type": "string", "pattern": "^x*$", "minLength": 3}, ("minLength",)),
        ({"type": "string", "maxLength": 10_000}, ("maxLength",)),
        ({"type": "array", "items": {"not": {"const": 1}}}, ("not",)),
        ({"if": {"type": "string"}, "then": False}, ("if",)),
        ({"type": "object", "unevaluatedProperties": False}, ()),
    ],
)
def test_what_a_grammar_cannot_hold_to_is_named(schema: Any, unenforced: tuple[str, ...]) -> None:
    text, named = grammar_of_schema(schema)
    assert named == unenforced
    json.loads(Grammar.parse(text).sample(random.Random(1)))


def test_large_counts_stay_within_what_llama_cpp_takes() -> None:
    text, named = grammar_of_schema({"type": "array", "minItems": 5000, "maxItems": 9000})
    assert named == ("minItems", "maxItems")
    assert max(int(n) for n in re.findall(r"\{(\d+)", text)) <= 2000


PATTERNS = [
    r"^abc$", r"^a.c$", r"^[a-f]+\.[^0-9]$", r"^\w+@\w+\.(com|org)$", r"^(?:ab){2,3}$", r"x{0}y",
    r"^[\d\-.]*$", r"^\x41\u00e9$", r"^(a||b)c?$", r"^\t$", r"^\S\s\S$", r"^a{2,}b??$",
    r"^[a-]$", r"^\D$", r"^/\*$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_python(pattern: str) -> None:
    made = grammar({"type": "string", "pattern": pattern})
    rng = random.Random(pattern)
    for _ in range(40):
        text = json.loads(made.sample(rng))
        assert re.search(pattern, text), text
    for text in ("", "abc", "a\nc", "ab", "x", "yy", "q@w.com", "aab", "Aé", "\t", "12-3.", "/*"):
        # plain or escaped, as a model may write it
        spelt = json.dumps(text, ensure_ascii=False)
        assert made.matches(spelt) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[a", "a{", "a{2001}", "(?<x>a)", r"\1", r"\bx", "a**", "*", "^^", "a$b", "[z-a]",
     "\\", r"\p{L}", "[]", "a{3,2}", r"\ud800", 7],
)  # fmt: skip
def test_patterns_without_equivalent_are_refused(pattern: object) -> None:
    with pytest.raises(Inexpressible):
        pattern_grammar(pattern, lambda name: name, lambda body: "part")


def test_the_naive_reader_of_grammars_can_fail() -> None:
    made = Grammar.parse('root ::= "a" b{2}\nb ::= [0-9] | "x"')
    assert made.matches("a1x")
    assert not made.matches("a1")
    assert not made.matches("a123")
    with pytest.raises(AssertionError):
        Grammar.parse("root ::= missing")
    with pytest.raises(AssertionError):
        Grammar.parse('root ::= "\\d"')


# -- files


def test_files_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('\ufeff{"type": "null"}', encoding="utf-8")
    assert read_schema(str(file)) == '{"type": "null"}'
    assert read_schema(' {"type": 3') == ' {"type": 3'
    assert read_schema("json") == "json"
    gbnf = tmp_path / "g.gbnf"
    gbnf.write_text('root ::= "é"\n', encoding="utf-8")
    assert read_grammar(str(gbnf)) == 'root ::= "é"\n'


@pytest.mark.parametrize("read", [read_grammar, read_schema])
def test_files_that_cannot_be_read_are_one_line(read: Any, tmp_path: Path) -> None:
    binary, zeros, large = (tmp_path / name for name in ("binary", "zeros", "large"))
    binary.write_bytes(b"\xff\xfe\x00")
    zeros.write_bytes(b"root\0")
    with large.open("wb") as stream:
        stream.truncate((4 << 20) + 1)
    for path in (binary, zeros, large, tmp_path, tmp_path / "missing", "a\0b", "~nobody-here/x"):
        with pytest.raises(UsageError, match="cannot read the ") as caught:
            read(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_grammar, read_schema])
def test_no_file_at_all_is_not_the_current_folder(read: Any) -> None:
    with pytest.raises(UsageError, match="is empty; give a file"):
        read("")


@pytest.mark.parametrize("text", ["", " \n", "root ::= \0", 'root ::= "\ud800"'])
def test_grammars_that_can_be_none(text: str) -> None:
    with pytest.raises(UsageError):
        check_grammar(text)
