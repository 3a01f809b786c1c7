"""Regular expressions: what libraries read differently is refused, in words."""

from __future__ import annotations

import re

import pytest

from quire.structured_output.registry import capabilities_of
from quire.structured_output.schema.regex import pattern_problem, regex_problem, without_anchors
from quire.structured_output.schema.regex_normal import normal


@pytest.mark.parametrize("pattern", ["a", "^a$", r"\d{3}-[a-f]+", "(?:a|b)*", r"a\$", "[$^]", "[a^]", r"\\"])
def test_a_plain_pattern_passes(pattern: str):
    assert regex_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("a$b", "within"), ("a^", "within"), ("(?=a)b", "special group"), ("(?P<n>a)", "special"), (r"(a)\1", r"'\1'"),
        (r"\ba", r"'\b'"), ("a++", "possessive"), ("(a", "unclosed"), ("a)", "without"), ("[a", "unclosed"),
        (r"\x4", "hexadecimal"), ("a\\", "'\\'"), ("[]a]", "first character of a class"),
        (r"[\w-z]", "a range"), (r"[a-\d]", "a range"), ("[a--b]", "reversed"), (r"\ud83d", "surrogate"),
        (r"[\ud800-\udfff]", "surrogate"), ("a{2}{3}", "nothing to repeat"), ("*a", "nothing to repeat"),
        ("a|+", "nothing to repeat"), ("^*", "nothing to repeat"), ("a{3,2}", "less than"),
        (r"[^\s\S]", "no character"),
    ],
)  # fmt: skip
def test_what_is_read_differently_is_refused(pattern: str, word: str):
    assert word in (regex_problem(pattern) or "")


def test_in_json_a_pattern_must_not_match_what_json_writes_otherwise():
    xgrammar, guidance, outlines = map(capabilities_of, ("xgrammar", "guidance", "outlines"))
    for pattern in ('"', r"\\", r"\n", r"\x22", r"\s", "[^a]", ".", r"\W"):
        assert pattern_problem(pattern, xgrammar) and pattern_problem(pattern, guidance) is None

    assert pattern_problem("^[ -~]+$", outlines) and pattern_problem("^[a-z]+$", outlines) is None


def test_anchors_at_the_ends_are_dropped_and_an_escaped_one_is_not():
    assert without_anchors("^a|b$") == "a|b"
    assert without_anchors(r"a\$") == r"a\$" and without_anchors(r"a\\$") == r"a\\"


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"\d+\w", "[0-9]+[0-9A-Z_a-z]"), (r"[\d.]x\\d", r"[.0-9]x\\d"), (r"[^\s]\D", r"[^\t-\r ][^0-9]"),
        (r"\[\d\]", r"\[[0-9]\]"), ("a[bd]c", "a[bd]c"), (r"[\^a]", "[a^]"), (r"[\^]", r"\^"),
        (r"[^\W\d_]", "[A-Za-z]"),
        (r"[^\D]", "[0-9]"), (r"[^\S]", r"[\t-\r ]"), (r"[\^+*/-]", r"[*+\-/^]"), ("[^^]", r"[^\^]"),
        ("[Z-a]", "[Z-a]"),
        ("[&~[]", r"[&\[~]"), ("a{x}", r"a\{x\}"), ("x{,2}y", "x{0,2}y"), ("{a}", r"\{a\}"), ("a+?b??", "a+b?"),
        (r"\x41\u0042", "AB"), (r"\u0000", r"\x00"), (r"[^-`]", "[^\\-`]"), (r"[\^-`]", "[_`^]"),
        (r"[\s\S]", r"[\s\S]"),
        ("a{}", r"a\{\}"), ("a{3}", "a{3}"), ("a{3,}", "a{3,}"),
    ],
)  # fmt: skip
def test_a_pattern_is_written_in_one_form(pattern: str, written: str):
    assert regex_problem(pattern) is None and normal(pattern) == written and normal(written) == written
    for text in ["", "^", "a", "A", "B", "AB", "é", "5", "_", "-", "`", "a{x}", "xxy", "a{}", "aaa", "{a}", "+", "[d]"]:
        assert bool(re.fullmatch(pattern, text, re.ASCII)) == bool(re.fullmatch(written, text, re.ASCII)), text
