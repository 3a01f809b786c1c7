"""The table keyword x library says what is so: a keyword that counts as honoured forbids what it should."""

from __future__ import annotations

import json

import pytest

from quire.config.structured_outputs import BACKENDS
from quire.structured_output.interface import GrammarError
from quire.structured_output.registry import capabilities_of
from quire.structured_output.schema.additional_properties import with_closed_objects
from quire.structured_output.schema.problems import find_problem
from quire.structured_output.schema.well_formed import malformed
from tests.effort import IS_FULL
from tests.structured.keyword_cases import CASES
from tests.structured.libraries import EOS, accepts, as_json, compiled, needs_libraries

LIBRARIES = {name: capabilities_of(name) for name in BACKENDS}
SLOW = ({"type": "array"}, {"type": "object"})
"""Values of any depth; outlines makes an automaton of them in many seconds."""
pytestmark = needs_libraries


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("keyword", CASES)
def test_what_a_keyword_forbids_cannot_be_written(library: str, keyword: str):
    for schema, allowed, forbidden in CASES[keyword]:
        if malformed(schema) or find_problem(schema, LIBRARIES[library]):
            continue
        if library == "outlines" and schema in SLOW and not IS_FULL:
            continue
        try:
            grammar = compiled(library, "json", json.dumps(with_closed_objects(schema)))
        except GrammarError:
            continue  # refused when it is compiled: late, but told
        assert [value for value in forbidden if accepts(grammar, as_json(value))] == [], schema
        if library == "lm-format-enforcer":  # free strings are ASCII without escapes
            allowed = [value for value in allowed if as_json(value).isascii() and "\\" not in as_json(value)]
        assert not allowed or any(accepts(grammar, as_json(value)) for value in allowed), schema


@pytest.mark.parametrize("keyword", [one for one in CASES if one not in ("dependentRequired", "dependentSchemas")])
def test_every_keyword_is_honoured_by_a_library_or_refused_by_its_path(keyword: str):
    for schema, _, _ in CASES[keyword]:
        problems = [malformed(schema) or find_problem(schema, library) for library in LIBRARIES.values()]
        assert None in problems or all(problem is not None and problem.path for problem in problems), schema


def test_jsonschema_agrees_with_the_cases():
    jsonschema = pytest.importorskip("jsonschema")
    for keyword, cases in CASES.items():
        if keyword in ("format", "additionalItems", "dependencies"):  # other drafts, or optional in this one
            continue
        for schema, allowed, forbidden in cases:
            validator = jsonschema.Draft202012Validator(schema)
            assert all(map(validator.is_valid, allowed)), (keyword, schema)
            assert not any(map(validator.is_valid, forbidden)), (keyword, schema)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("body", [b"\x14", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b'"', b"\\"], ids=repr)
def test_a_string_of_bounded_length_holds_no_byte_that_json_forbids_or_counts_otherwise(library: str, body: bytes):
    for schema in ({"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^.{1,3}$"}):
        if find_problem(schema, LIBRARIES[library]) is None:
            state = compiled(library, "json", json.dumps(schema)).start()
            assert not all(state.accept(byte) for byte in b'"' + body + b'"') or not state.accept(EOS)


def test_a_recursive_schema_is_honoured_at_any_depth_or_refused():
    node = {"v": {"type": "null"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": node, "required": ["v", "next"], "additionalProperties": False}
    for library in LIBRARIES:
        if find_problem(schema, LIBRARIES[library]) is None:
            grammar = compiled(library, "json", json.dumps(schema))
            end = "}" * 9
            assert accepts(grammar, '{"v":null,"next":' * 9 + "null" + end)
            assert not accepts(grammar, '{"v":null,"next":' * 8 + '{"v":null,' + end)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_label_of_a_host_has_at_most_63_characters(library: str):
    for name, before in (("hostname", ""), ("email", "a@b.")):
        schema = {"type": "string", "format": name}
        if find_problem(schema, LIBRARIES[library]) is None:
            grammar = compiled(library, "json", json.dumps(schema))
            assert accepts(grammar, f'"{before}{"a" * 63}"') and not accepts(grammar, f'"{before}{"a" * 64}"')
