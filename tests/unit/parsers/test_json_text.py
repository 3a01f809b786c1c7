"""JSON that is checked as it comes: the same texts as Python's strict reader takes, in any cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.parsers.json_text import MAX_DEPTH, MAX_NUMBER_CHARS, JsonText, short_string
from quire.parsers.reader import Reader
from quire.parsers.tools import decode

GOOD = (
    "{}", "[]", '""', "0", "-0.5e+10", "true", "false", "null", '{"a": [1, {"b": null}], "c": "\\u00e9\\n\\"é"}',
    "[[], {}, [{}]]", '{"": {"": ""}}', "[1,2 ,\t3\n]", '"\\ud83d\\ude00 \\/ \\\\"', "1E5", "[true,false]",
)  # fmt: skip
BAD = (
    "", "{", "[", '"', '"\\x"', '"\\u12g4"', '"a\nb"', "01", "1.", ".5", "+1", "--1", "1e", "tru", "True", "NaN", "nul",
    "{a: 1}", "{'a': 1}", '{"a" 1}', '{"a": }', '{"a": 1,}', "[1,]", "[,]", "[1 2]", "]", "}", '{"a": 1]', "[1}", "-",
    '{1: 2}', '{"a"}', "undefined", '{"a": 1', '"\x00"', "Infinity",
)  # fmt: skip


def checked(parts: list[str], max_chars: int | None = None) -> tuple[bool, str, str]:
    """(it is JSON, what was told of it, what is left)."""
    reader = Reader()
    told: list[str] = []
    results: list[bool] = []

    def run() -> Any:
        results.append((yield from JsonText(reader, told.append, max_chars).read()))
        yield from reader.forward_rest(rest.append)

    rest: list[str] = []
    steps = run()
    for part in parts:
        reader.add(part)
        next(steps, None)
    reader.is_over = True
    for _ in steps:
        raise AssertionError("nothing more comes")
    return results[0], "".join(told), "".join(rest)


def is_json(text: str) -> bool:
    try:
        decode(text)
    except ValueError:
        return False
    return text == text.strip()


@pytest.mark.parametrize("text", GOOD)
def test_json_is_told_whole(text):
    for parts in ([text], list(text)):
        assert checked(parts) == (True, text, "")
        assert checked([*parts, " x"]) == (True, text, " x")


@pytest.mark.parametrize("text", BAD, ids=repr)
def test_what_is_not_json_is_found_and_nothing_of_it_is_lost(text):
    for parts in ([text], list(text)):
        good, told, rest = checked(parts)
        assert not good or rest, "a beginning may be JSON"
        assert told + rest == text
        assert (good and not rest) == is_json(text)


def test_damaged_json_is_judged_as_pythons_strict_reader_does():
    rng = random.Random(3)
    for _ in range(1500):
        text = rng.choice(GOOD)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text) + 1)
            piece = rng.choice(('"', "\\", "{", "}", "[", "]", ",", ":", "1", "e", "-", " ", "", "t"))
            text = text[:place] + piece + text[place + rng.randint(0, 1) :]
        cut = rng.randrange(len(text) + 1)
        whole = checked([text])
        assert checked([text[:cut], text[cut:]]) == whole
        assert whole[1] + whole[2] == text
        assert (whole[0] and not whole[2]) == is_json(text), text


def test_depth_numbers_and_lengths_have_limits_that_no_cut_moves():
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    assert not checked([deep])[0] and checked([deep[1:-1]])[0]
    assert not checked(["1" * (MAX_NUMBER_CHARS + 1)])[0] or checked(["1" * (MAX_NUMBER_CHARS + 1)])[2]
    text = '{"key": "some text", "n": [12, 345]}'
    for limit in range(len(text) + 2):
        whole = checked([text], limit)
        assert checked(list(text), limit) == whole
        assert whole[0] == (limit >= len(text)) and whole[1] + whole[2] == text and len(whole[1]) <= max(limit, 0)


def test_a_short_string_is_read_with_its_escapes():
    for text, value in (('"a\\u00e9"', "aé"), ('"' + "x" * 20 + '"', None), ("5", None), ('"a', None), ("", None)):
        reader = Reader()
        reader.add(text)
        reader.is_over = True
        with pytest.raises(StopIteration) as stopped:
            next(short_string(reader, 10))
        assert stopped.value.value == value
        assert value is None or json.loads(text) == value
