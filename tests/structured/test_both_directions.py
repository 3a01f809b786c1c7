"""Schemas in both directions: what they forbid cannot be written in any spelling, what they allow can."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import ValidationError
from quire.structured_output.choose import honouring, resolve_structured_outputs
from quire.structured_output.interface import CompiledGrammar
from quire.structured_output.spec import spec_of
from tests.structured.json_schema_suite import Suite, spellings
from tests.structured.libraries import BYTES, accepts, compiled, needs_libraries

pytestmark = needs_libraries
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
OPEN = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": True}
# Schemas under which other names may follow the declared ones, and a text in which one of those has a second spelling.
ESCAPED: dict[str, tuple[Any, str, str]] = {
    "additionalProperties": (OPEN, '{"a":1,"b":"s"}', '{"a":1,"\\u0061":"s"}'),
    "a schema of the others": (
        OPEN | {"additionalProperties": TEXT}, '{"a":1,"b":"s"}', '{"a":1,"\\u0061":"s"}',
    ),
    "a name that is forbidden": (
        {"type": "object", "properties": {"a": False}, "additionalProperties": True}, '{"b":1}', '{"\\u0061":1}',
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^b": NUMBER}}, '{"b":1,"c":"s"}', '{"\\u0062x":"s"}',
    ),
    "allOf": (
        {"allOf": [{"type": "object", "properties": {"a": NUMBER}}, {"properties": {"b": NUMBER}}]},
        '{"a":1,"b":2,"c":"s"}', '{"\\u0061":"s"}',
    ),
    "anyOf": (
        {"type": "object", "properties": {"a": NUMBER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"a":1}', '{"a":1,"\\u0061":"s"}',
    ),
    "no type": ({"properties": {"a": NUMBER}}, '{"b":"s"}', '{"\\u0061":"s"}'),
    "a slash": (
        {"type": "object", "properties": {"a/b": NUMBER}, "additionalProperties": True}, '{"a/b":1}', '{"a\\/b":"s"}',
    ),
    "beyond ASCII": (
        {"type": "object", "properties": {"é": NUMBER}, "additionalProperties": True}, '{"é":1}', '{"\\u00e9":"s"}',
    ),
    "a line break": (
        {"type": "object", "properties": {"a\n": NUMBER}, "additionalProperties": True},
        '{"a\\n":1}', '{"a\\u000a":"s"}',
    ),
    "half of an escape": (OPEN, '{"a":1,"\\u001fx\\\\":"s"}', '{"a":1,"\\u001Fx":"s"}'),
}  # fmt: skip


def every_grammar(schema: Any) -> dict[str, CompiledGrammar]:
    """Grammars of the libraries that honour `schema`, but for outlines, which takes minutes for lists of anything."""
    found = {}
    for library in set(BACKENDS) - {"outlines"}:
        config = StructuredOutputsConfig(backend=library, disable_any_whitespace=True)
        try:
            spec = spec_of(resolve_structured_outputs(StructuredOutputsParams(json=schema), config))
        except ValidationError:
            continue
        found[library] = compiled(library, "json", spec.text)
    assert found
    return found


@pytest.mark.parametrize("name", ESCAPED)
def test_a_declared_name_has_one_spelling_where_others_may_follow(name: str):
    schema, allowed, forbidden = ESCAPED[name]
    for library, grammar in every_grammar(schema).items():
        assert not accepts(grammar, forbidden), library
        if name != "no type" or library == "guidance":  # others assume an object, and close it
            assert accepts(grammar, allowed), library


def test_one_spelling_holds_in_masks_across_tokens_and_when_they_are_taken_back():
    suite = Suite(BYTES)
    grammar = compiled("guidance", "json", json.dumps(OPEN))
    assert suite.is_reachable(grammar, '{"a":1,"\\u0001":2}') and not suite.is_reachable(grammar, '{"a":1,"\\u0061":2}')
    state = grammar.start()
    for byte in b'{"a":1,"\\u00':
        assert state.accept(byte)
    assert not state.accept(ord("6"))
    state.rollback(4)
    assert all(map(state.accept, b'\\n":2}'))


FORMATS = {
    "date": (
        "2024-02-29 2000-02-29 2021-12-31 2021-11-30 0001-01-01",
        "2021-02-29 1900-02-29 2021-11-31 2021-04-31 2021-00-10 2021-01-00 2021-13-01 0000-01-01 2021-1-1",
    ),
    "time": (
        "00:00:00Z 23:59:59.5+14:00 23:59:60Z 12:34:56z",
        "22:59:60Z 23:58:60Z 24:00:00Z 10:00:60+00:00 12:00:00 12:60:00Z 12:00:00+24:00",
    ),
    "date-time": (
        "1990-02-28T23:59:60Z 2024-02-29t01:02:03.25-08:00",
        "1990-02-31T15:59:59Z 1998-12-31T23:58:60Z 2023-02-29T00:00:00Z 2024-02-29 01:02:03Z",
    ),
    "ipv4": ("0.0.0.0 87.10.0.1 255.255.255.255", "087.10.0.1 256.0.0.1 1.2.3 1.2.3.4.5 1.2.3.00"),
    "ipv6": ("::1 :: 1:2:3:4:5:6:7:8 ::ffff:192.168.0.1", "1:2:3 12345:: 1::2::3 ::256.1.1.1 1:2:3:4:5:6:7:8:9"),
    "email": ("te~st@example.com a.b@c.example", "a.@b.cd .a@b.cd a..b@c.de @b.cd a@-b.cd"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_standard_says(name: str):
    for library, grammar in every_grammar({"type": "string", "format": name}).items():
        valid, invalid = (text.split() for text in FORMATS[name])
        if library == "xgrammar" and name == "ipv6":  # narrower
            valid = valid[:1]
        assert [text for text in valid if not accepts(grammar, json.dumps(text))] == [], library
        assert [text for text in invalid if accepts(grammar, json.dumps(text))] == [], library


@pytest.mark.parametrize("text", ["15:59:60-08:00", "01:29:60+01:30", "00:29:60-23:30", "23:59:60.123+00:00"])
def test_a_leap_second_has_the_offset_of_its_clock(text: str):
    grammar = every_grammar({"type": "string", "format": "time"})["guidance"]
    later = text.replace(":60", ":59").replace("29:59", "28:60").replace("59:59", "58:60")
    assert accepts(grammar, json.dumps(text)) and not accepts(grammar, json.dumps(later))


def test_ignored_text_of_a_lark_grammar_stands_between_its_tokens():
    grammar = compiled("guidance", "grammar", 'start: A B\nA: "a"\nB: "b"\n%ignore / +/\n')
    assert [text for text in ("ab", "a b", " ab", "ab ") if accepts(grammar, text)] == ["ab", "a b"]


# schema, values that can be written by a library that `auto` asks, values that none writes.
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "contains true is an item": ({"type": "array", "contains": True}, [[1], ["a", 2]], [[], {}]),
    "contains true of any type": ({"contains": {}, "minItems": 0}, [[1], "a", 3], [[]]),
    "items may follow the first": ({"type": "array", "prefixItems": [NUMBER]}, [[1], [1, "a", None], []], [["a"]]),
    "two items at most": ({"type": "array", "prefixItems": [NUMBER], "maxItems": 2}, [[1, "a"]], [["a"], [1, 2, 3]]),
    "no type, no object": ({"properties": {"a": NUMBER}, "required": ["a"]}, [{"a": 1}, [], "x", None], [{}]),
    "no type, no list": ({"items": NUMBER}, [[1], {}, "x"], [["a"]]),
    "a decimal count": ({"type": "array", "minItems": 2.0, "maxItems": 3.0}, [[1, 2]], [[1], [1, 2, 3, 4]]),
    "items that need not differ": (
        {"prefixItems": [{"type": "boolean"}], "uniqueItems": False}, [[True, True], [False, "a", "a"]], [[1]],
    ),
    "names are closed where an object is said": (
        {"type": "object", "properties": {"a": NUMBER}}, [{}, {"a": 1}], [{"b": 1}, {"a": "s"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_honoured_in_both_directions(name: str):
    schema, allowed, forbidden = SCHEMAS[name]
    suite = Suite(BYTES)
    grammar = suite.grammar(schema, "auto")
    assert isinstance(grammar, CompiledGrammar), grammar
    for value in allowed:
        assert any(suite.is_reachable(grammar, text) for text in spellings(value, every=False)), value
    for library, one in {**every_grammar(schema), "auto": grammar}.items():
        for value in forbidden:
            assert not any(accepts(one, text) for text in spellings(value, every=True)), (library, value)


def test_a_schema_without_type_goes_to_a_library_that_assumes_one_only_when_no_other_honours_it():
    schema = {"properties": {"a": NUMBER}}
    names = [one.backend for one in honouring(StructuredOutputsParams(json=schema), StructuredOutputsConfig())]
    assert names[0] == "guidance" and "xgrammar" in names
    only = resolve_structured_outputs(StructuredOutputsParams(json=schema), StructuredOutputsConfig(backend="xgrammar"))
    assert json.loads(str(only.json))["type"] == "object"


def test_formats_that_cost_seconds_with_a_large_vocabulary_are_compiled_lazily():
    params = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "string", "format": "email"}}}
    )
    assert resolve_structured_outputs(params, StructuredOutputsConfig()).backend == "guidance"


def test_patterns_of_structural_tags_are_read_as_all_others():
    tag = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "^[\\^a]+\\d$"}]}}
    params = StructuredOutputsParams(structural_tag=tag)
    spec = spec_of(resolve_structured_outputs(params, StructuredOutputsConfig()))
    grammar = compiled(spec.backend, spec.kind, spec.text)
    assert accepts(grammar, "^a5") and not accepts(grammar, "b5") and not accepts(grammar, "^a\u0663")
    with pytest.raises(ValidationError, match=r"elements/0/pattern.*surrogate"):
        tag["format"]["elements"][0]["pattern"] = r"\ud83d"  # type: ignore[index]
        resolve_structured_outputs(StructuredOutputsParams(structural_tag=tag), StructuredOutputsConfig())


def test_a_schema_within_a_tag_is_simplified_and_taken_for_an_object_or_a_list():
    inner = {"type": "object", "properties": {"p": {"properties": {"a": NUMBER}}}, "required": ["p"]}
    lists = {"type": "array", "items": NUMBER, "contains": True, "maxItems": 2.0}
    tag = {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": inner},
           {"type": "json_schema", "json_schema": lists}]}}  # fmt: skip
    params = StructuredOutputsParams(structural_tag=tag)
    spec = spec_of(resolve_structured_outputs(params, StructuredOutputsConfig()))
    assert spec.backend == "xgrammar"
    grammar = compiled(spec.backend, spec.kind, spec.text)
    assert accepts(grammar, '{"p": {"a": 1}}[1]') or accepts(grammar, '{"p":{"a":1}}[1]')
    assert not accepts(grammar, '{"p":3}[1]') and not accepts(grammar, '{"p": {"a": 1}}[]')
    tag["format"]["elements"][1]["json_schema"] = {"type": "array", "maxItems": "x"}  # type: ignore[index]
    with pytest.raises(ValidationError, match=r"at #/format/elements/1/json_schema/maxItems: the value"):
        resolve_structured_outputs(StructuredOutputsParams(structural_tag=tag), StructuredOutputsConfig())


CLASSES = (
    r"\W", r"\D", r"\S", r"[^\W]", r"[^\D]", r"[^\S]", r"[^\W\d_]", r"[\W_]", r"[^\w\s]", r"[^a-f]", r"[^é]",
    r"[^\x00-\x7f]", r"[^\"]", r"[^\\]", r"[^\"\\]", r"[^\s\"]", r"[^\n]", r"[\x00-\x1f]",
    r"(?:[\x00-\x07]|[\x08-\x1f])", r"(?:[^\"a]|[\x00-\x05])", r"(?:[^\"]|b)", r"[\s\S]", ".",
)  # fmt: skip
CHARACTERS = [*map(chr, range(128)), *"éßЖ٣۵寇！ªº²½\u00a0\u2003\u2028😀𝔸\u0301\uff11"]


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_match_as_in_python_wherever_a_pattern_stands_and_however_json_writes_the_character(pattern: str):
    """But for NUL, which a class without quotes leaves out, and DEL, which the library does not write in JSON."""
    params = (
        StructuredOutputsParams(regex=pattern),
        StructuredOutputsParams(json={"type": "string", "pattern": f"^{pattern}$"}),
    )
    specs = [spec_of(resolve_structured_outputs(one, StructuredOutputsConfig())) for one in params]
    plain, in_json = (compiled(spec.backend, spec.kind, spec.text) for spec in specs)
    for char in CHARACTERS:
        is_matched = re.fullmatch(pattern, char, re.ASCII) is not None
        assert accepts(plain, char) == is_matched, repr(char)
        written = {json.dumps(char), json.dumps(char, ensure_ascii=False)}
        if char < "\x80":
            written.add(f'"\\u{ord(char):04x}"')
        can_write = any(accepts(in_json, text) for text in written)
        assert can_write == is_matched or (is_matched and char in "\0\x7f"), repr(char)


def test_a_pattern_in_a_schema_that_names_nul_is_refused():
    for pattern in (r"a\x00", r"(?:[^\"]|[\x00])"):
        with pytest.raises(ValidationError, match="names NUL"):
            resolve_structured_outputs(
                StructuredOutputsParams(json={"pattern": pattern, "type": "string"}), StructuredOutputsConfig()
            )
