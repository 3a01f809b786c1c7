"""Schemas are refused by the path of what cannot be honoured, whatever is installed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.structured_output.registry import capabilities_of
from quire.structured_output.schema.additional_properties import with_closed_objects
from quire.structured_output.schema.forms import simplified
from quire.structured_output.schema.lengths import PLAIN, with_patterns
from quire.structured_output.schema.problems import find_problem
from quire.structured_output.schema.references import find_cycle
from quire.structured_output.schema.well_formed import malformed


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "strin"}, "/type"),
        ({"properties": {"a/b": {"minimumm": 1}}}, "/properties/a~1b/minimumm"),
        ({"anyOf": [{"type": "null"}, 7]}, "/anyOf/1"),
        ({"$ref": "#/$defs/x"}, "/$ref"),
        ({"items": {"enum": []}}, "/items/enum"),
    ],
)
def test_what_is_no_schema_is_named_by_its_path(schema: Any, path: str):
    problem = malformed(schema)
    assert problem is not None and problem.path == path


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ({"minLength": 3}, "/minLength"),
        ({"type": "string", "anyOf": [{"maxLength": 1}]}, "/anyOf"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "/pattern"),
        ({"type": "string", "enum": ["a", 1]}, "/enum"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"type": "object", "required": ["a"]}, "/required"),
    ],
)
def test_what_xgrammar_would_drop_is_named_by_its_path(schema: Any, path: str):
    problem = find_problem(schema, capabilities_of("xgrammar"))
    assert problem is not None and problem.path == path
    assert malformed(schema) is None


def test_annotations_and_what_forbids_nothing_pass():
    schema = {"type": "string", "title": "t", "x-own": 1, "minLength": 0, "$comment": "c", "default": "d", "$id": "u"}
    assert malformed(schema) is None and find_problem(schema, capabilities_of("xgrammar")) is None


def test_objects_that_name_properties_are_closed_unless_they_say_otherwise_or_are_combined():
    inner = {"type": "object", "properties": {"properties": {"type": "null"}}}
    assert with_closed_objects({"items": inner}) == {"items": {**inner, "additionalProperties": False}}
    for schema in ({**inner, "additionalProperties": True}, {"allOf": [inner, inner]}, {"enum": [inner]}):
        assert with_closed_objects(schema) == schema


def test_lengths_become_patterns_of_plain_characters():
    schema = {"properties": {"minLength": {"type": "string", "minLength": 1, "maxLength": 2}}}
    assert with_patterns(schema) == {"properties": {"minLength": {"type": "string", "pattern": f"^{PLAIN}{{1,2}}$"}}}
    assert with_patterns({"minLength": 3}) == {"pattern": f"^{PLAIN}{{3,}}$"}


@pytest.mark.parametrize(
    ("schema", "is_cyclic"),
    [
        ({"$defs": {"a": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}, False),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}, "$ref": "#/$defs/a"}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, True),
        ({"properties": {"x": {"items": {"$ref": "#/properties/x"}}}}, True),
    ],
)
def test_a_reference_that_leads_back_to_itself_is_found(schema: Any, is_cyclic: bool):
    assert (find_cycle(schema) is not None) == is_cyclic


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True], ids=str)
def test_names_of_properties_that_may_be_anything_are_left_out(names: Any):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": names}
    assert find_problem(schema, capabilities_of("xgrammar")) is not None
    assert find_problem(simplified(schema), capabilities_of("xgrammar")) is None
    limited = {"type": "object", "propertyNames": {"type": "string", "maxLength": 3}}
    assert simplified(limited) == limited
