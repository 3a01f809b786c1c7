"""Regular expressions: what libraries read differently is refused, in words."""

from __future__ import annotations

import pytest

from quire.structured_output.schema_regex import pattern_problem, regex_problem, with_ascii_classes, without_anchors


@pytest.mark.parametrize("pattern", ["a", "^a$", r"\d{3}-[a-f]+", "(?:a|b)*", r"a\$", "[$^]", "[a^]", r"\\"])
def test_a_plain_pattern_passes(pattern: str):
    assert regex_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("a$b", "within"), ("a^", "within"), ("(?=a)b", "not plain"), ("(?P<n>a)", "not plain"), (r"(a)\1", r"'\1'"),
        (r"\ba", r"'\b'"), ("a++", "possessive"), ("(a", "not closed"), ("a)", "without"), ("[a", "not closed"),
        (r"\x4", "hexadecimal"), ("a\\", "'\\'"), ("[]a]", "first of a class"),
    ],
)  # fmt: skip
def test_what_is_read_differently_is_refused(pattern: str, word: str):
    assert word in (regex_problem(pattern) or "")


def test_in_json_a_pattern_must_not_match_what_json_writes_otherwise():
    for pattern in ('"', r"\\", r"\n", r"\x22", r"\s", "[^a]", ".", r"\W"):
        assert pattern_problem(pattern, "xgrammar") and pattern_problem(pattern, "guidance") is None


def test_anchors_at_the_ends_are_dropped_and_an_escaped_one_is_not():
    assert without_anchors("^a|b$") == "a|b"
    assert without_anchors(r"a\$") == r"a\$" and without_anchors(r"a\\$") == r"a\\"


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"\d+\w", "[0-9]+[0-9A-Za-z_]"), (r"[\d.]x\\d", r"[0-9.]x\\d"), (r"[^\s]\D", r"[^ \t\n\r\f\v]\D"),
        (r"\[\d\]", r"\[[0-9]\]"), ("a[b]c", "a[b]c"),
    ],
)  # fmt: skip
def test_classes_are_written_as_their_ascii_members(pattern: str, written: str):
    assert with_ascii_classes(pattern) == written
