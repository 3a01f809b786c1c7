"""Structural tags of requests are read into one typed grammar, which is written as the same tag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.call_grammar import (
    AnyText,
    Choice,
    Dispatch,
    Literal,
    Regex,
    Repeat,
    Schema,
    Sequence,
    Tag,
    Token,
    TriggeredTags,
    parts_of,
    with_parts,
)
from quire.errors import ValidationError
from quire.structured_output.structural_tags import grammar_of_text, read_tag, schemas_of, tag_of, token_ids_of

TEXT = {"type": "const_string", "value": "x"}
TAG = {"begin": "<a>", "content": {"type": "any_text", "excludes": ["q"]}, "end": ["</a>", "."]}


def test_a_tag_is_read_into_typed_parts_and_written_as_it_was():
    tag: dict[str, Any] = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [
            TEXT, {"type": "tag", **TAG}, {"type": "token", "token": 5},
            {"type": "repeat", "min": 1, "max": -1,
             "content": {"type": "json_schema", "json_schema": {"type": "null"}}},
        ]},
    }  # fmt: skip
    grammar = read_tag("f", tag)
    assert grammar == Sequence(
        (Literal("x"), Tag("<a>", AnyText(("q",)), ("</a>", ".")), Token(5), Repeat(1, -1, Schema({"type": "null"})))
    )
    assert json.loads(json.dumps(tag_of(grammar))) == tag and grammar_of_text(json.dumps(tag)) == grammar
    assert schemas_of(grammar) == [("/format/elements/3/content/json_schema", {"type": "null"})]
    assert token_ids_of(grammar) == {5}


def test_a_tag_needs_no_type_and_the_older_form_is_one_of_triggers():
    assert read_tag("f", {"format": {"type": "or", "elements": [TAG, TEXT]}}) == Choice(
        (Tag("<a>", AnyText(("q",)), ("</a>", ".")), Literal("x"))
    )
    structures = [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]
    assert read_tag("f", {"structures": structures, "triggers": ["<f"]}) == TriggeredTags(
        ("<f",), (Tag("<f>", Schema({"type": "object"}), "</f>"),)
    )


def test_what_another_program_writes_out_and_asks_for_nothing_is_left_out():
    schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"properties": {"style": {}}}}
    written = {**schema, "style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}
    assert read_tag("tag", {"format": written}) == read_tag("tag", {"format": schema})
    with pytest.raises(ValidationError, match="style"):
        read_tag("tag", {"format": {**written, "style": "qwen_xml"}})


def test_all_parts_are_found_by_their_paths_and_the_innermost_can_be_changed():
    grammar = Dispatch((("a", Choice((Regex("b"), Literal("c")))),))
    assert [path for path, _ in parts_of(grammar, "/format")] == [
        "/format", "/format/rules/0/1", "/format/rules/0/1/elements/0", "/format/rules/0/1/elements/1",
    ]  # fmt: skip
    changed = with_parts(grammar, lambda part: Literal("d") if isinstance(part, Regex) else part)
    assert changed == Dispatch((("a", Choice((Literal("d"), Literal("c")))),))


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (5, "#: it must be an object"),
        ({"format": TEXT, "x": 1}, "#/x: it is unknown"),
        ({"type": "tag", "format": TEXT}, "#/type"),
        ({"format": 3}, "#/format: expected `object`"),
        ({"format": {"type": "text"}}, "#/format/type: expected one of any_text"),
        ({"format": {"type": "or", "elements": []}}, "#/format/elements: expected `array` of length >= 1"),
        ({"format": {"type": "or", "elements": [TEXT, {**TEXT, "y": 1}]}}, "#/format/elements/1/y: it is unknown"),
        ({"format": {"type": "dispatch", "rules": [["a", TEXT], ["b", 3]]}}, "#/format/rules/1/1: expected `object`"),
        ({"format": {**TAG, "begin": 3}}, "#/format/begin: expected"),
        ({"format": {"type": "tag", "begin": "a", "end": "b"}}, "#/format: object missing required field `content`"),
        ({"format": {"type": "json_schema", "json_schema": {}, "max_whitespace_cnt": 0}}, "#/format/max_whitesp"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "#/format/pattern: it has"),
        ({"structures": [{"begin": "a"}], "triggers": []}, "#/structures/0: object missing"),
        ({"structures": [], "triggers": ["a"]}, "#/structures: expected `array` of length >= 1"),
    ],
)  # fmt: skip
def test_what_is_no_tag_is_refused_by_its_place(tag: Any, words: str):
    with pytest.raises(ValidationError) as caught:
        read_tag("f", tag)
    assert f"f at {words}" in caught.value.message and caught.value.field == "f"
