"""Every format of tool calls: what is read, and that it does not depend on how the answer is cut."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from quire.parsers.base import ToolCallParser
from quire.parsers.registry import TOOL_CALL_PARSERS
from quire.parsers.tool_calls.pattern import PatternFormat
from tests.effort import effort
from tests.unit.parsers.catalogue import CALLS, FORMATS, MARKERS, PLAIN, Call, contents
from tests.unit.parsers.folding import TOOLS, Answer, check_splits, read
from tests.unit.parsers.special import SPECIAL, Special
from tests.unit.parsers.special_json import SPECIAL_JSON
from tests.unit.parsers.special_marked import MARKED, specials

AT_ONCE = ("pythonic", "lfm2", "olmo3", "pattern")
"""Formats whose calls are told when they are complete."""
PATTERN = PatternFormat({"begin": "@@", "end": "@/@", "pattern": r"(?P<name>\w+) => (?P<arguments>.*)"})


def maker(name: str, *, buffers_tool_calls: bool = False) -> Callable[[], ToolCallParser]:
    made: Any = PATTERN if name == "pattern" else TOOL_CALL_PARSERS[name.split("-named")[0]]
    return lambda: made(TOOLS, buffers_tool_calls=buffers_tool_calls)


def parsed(answer: Answer) -> list[Call]:
    return [(name, json.loads(text)) for name, text in answer.calls]


def written(name: str, num_marks: int | None = None) -> list[tuple[str, list[Call], str]]:
    """(answer, its calls, its content); with texts of so many marks, None = all."""
    form = FORMATS[name]
    cases = [(form.write(calls), calls, "") for calls in CALLS]
    cases += [
        (form.write(calls), calls, "")
        for calls in contents()[:num_marks]
        if not form.own_end or form.own_end not in calls[0][1]["content"]
    ]
    if form.allows_before and name != "openai":
        cases += [(f"Let me see.\n\n{form.write(calls)}", calls, "Let me see.") for calls in CALLS[1:5]]
        cases += [(f" <x> [y] {{z}}: é{form.write(calls)}", calls, " <x> [y] {z}: é") for calls in CALLS[1:3]]
    return cases


def recorded(name: str, num_marks: int | None = None) -> list[str]:
    """Answers that are written in the format, whole or broken."""
    return [text for text, _, _ in written(name, num_marks)] + [text for text, _, _ in special(name)]


def special(name: str) -> Special:
    """Answers that are special to the format."""
    return {**SPECIAL, **SPECIAL_JSON}.get(name, []) + (specials(MARKED[name]) if name in MARKED else [])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_they_were_meant(name):
    for text, calls, content in written(name):
        for buffers_tool_calls in (False, True):
            answer = read(maker(name, buffers_tool_calls=buffers_tool_calls)(), [text])
            assert (parsed(answer), answer.content) == (calls, content), text


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_special_to_a_format_is_read_as_meant(name):
    for text, content, calls in special(name):
        answer = read(maker(name)(), [text])
        assert (answer.content, answer.calls) == (content, calls), text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_is_content(name):
    for text in PLAIN:
        for buffers_tool_calls in (False, True):
            answer = read(maker(name, buffers_tool_calls=buffers_tool_calls)(), [text])
            assert answer == Answer(content=text), text


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_an_unknown_function_is_content(name):
    text = FORMATS[name].write([("rm_rf", {"path": "/"})])
    assert read(maker(name)(), [text]) == Answer(content=text)


@pytest.mark.parametrize("name", FORMATS)
def test_every_split_is_read_as_the_whole(name):
    texts = recorded(name, num_marks=4) + PLAIN  # with one mark or another in a text, answers are alike
    check_splits(maker(name), texts)
    check_splits(maker(name, buffers_tool_calls=True), texts, in_two=False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_forty_answers_of_its_own(name):
    assert len(set(recorded(name)) - set(PLAIN)) >= 40


def test_every_parser_has_its_format():
    assert {type(maker(name)()) for name in FORMATS if name != "pattern"} == set(TOOL_CALL_PARSERS.values())


@pytest.mark.parametrize("name", FORMATS)
def test_the_name_comes_first_and_arguments_as_they_are_written(name):
    """Where arguments are JSON, or texts of an XML parameter, all but the last few characters are told at once."""
    text = FORMATS[name].write([("write_file", {"path": "p", "content": "x" * 400})])
    parser = maker(name)()
    events = parser.push(text[:320])
    if name in AT_ONCE:
        assert not events
    else:
        assert len(read(_Given(events), []).calls[0][1]) > 150


class _Given:
    """Events as a parser that has nothing more to say."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def push(self, text: str) -> list[Any]:
        return []

    def finish(self) -> list[Any]:
        return self._events


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_answer_has_a_beginning_of_the_arguments_or_is_content_when_calls_are_held(name):
    calls = [("get_weather", {"city": "Oslo", "days": 12}), ("search", {"query": "b"})]
    text = FORMATS[name].write(calls)
    whole = read(maker(name)(), [text]).calls
    for end in range(len(text)):
        cut = read(maker(name)(), [text[:end]])
        assert len(cut.calls) <= 2
        for (own, arguments), (meant, all_arguments) in zip(cut.calls, whole, strict=False):
            assert own == meant
            if name in MARKED or "gemma" in name:  # a value's end that is cut is part of the value
                arguments = re.split(r"\n|\\n|<", arguments)[0]
            assert all_arguments.startswith(arguments)
        held = read(maker(name, buffers_tool_calls=True)(), [text[:end]])
        assert held.calls == whole[: len(held.calls)], "a held call is whole"
        if not held.calls:
            assert held.content.strip() == text[:end].strip() or name == "openai"


@pytest.mark.parametrize("name", FORMATS)
def test_held_calls_are_json_whatever_the_model_writes(name):
    rng = random.Random(5)
    for text, _, _ in written(name):
        for _ in range(6):
            place = rng.randrange(len(text))
            damaged = text[:place] + rng.choice(("", '"', "}", "]", "\\", "\n", "x", *MARKERS)) + text[place + 1 :]
            answer = read(maker(name, buffers_tool_calls=True)(), [damaged])
            assert all(isinstance(arguments, dict) for _, arguments in parsed(answer)), damaged


@pytest.mark.parametrize("name", FORMATS)
def test_random_pieces_of_the_format_lose_nothing_and_are_read_alike_in_any_cut(name):
    rng = random.Random(name)
    pieces = [
        *MARKERS,
        '{"name": "now"',
        ', "arguments": {',
        "}",
        "]",
        "[",
        ",",
        '"',
        "\\",
        " ",
        "\n",
        "é",
        "now(",
        ")",
    ]
    pieces += [
        "<parameter=x>",
        "</parameter>",
        "<function=now>",
        "@@",
        "now => {}",
        "@/@",
        "<｜tool▁calls▁begin｜>",
        "now",
    ]
    pieces += [
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<|channel|>",
        "<|message|>",
        " to=functions.now",
        "<|start|>",
    ]
    for _ in range(60):
        chosen = [rng.choice(pieces) for _ in range(rng.randint(3, 14))]
        text = "".join(chosen)
        for buffers_tool_calls in (False, True):
            make = maker(name, buffers_tool_calls=buffers_tool_calls)
            whole = read(make(), [text])
            assert read(make(), chosen) == whole and read(make(), list(text)) == whole, text
            if not whole.calls and name != "openai":
                assert whole.content == text


HOSTILE = {
    "hermes": '<tool_call>{"name": "', "llama3_json": '<|python_tag|>{"name": "now", "x": [', "pythonic": "[now(x=[",
    "mistral": '[TOOL_CALLS] [{"name":', "mistral-named": "[TOOL_CALLS]now[ARGS]", "pattern": "@@",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31": "<｜tool▁call▁begin｜>now",
    "granite": '<|tool_call|>[{"arguments": {"a": [', "granite-20b-fc": '<function_call>{"arguments": {"a":',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>", "gemma4": "<|tool_call>call:now{x:[",
    "functiongemma": "<start_function_call>call:now{x:{", "internlm": '<|action_start|><|plugin|>{"name":',
    "longcat": '<longcat_tool_call>{"x":', "jamba": '<tool_calls>[{"name":', "phi4_mini_json": "functools[{",
    "xlam": '[{"name"', "lfm2": "<|tool_call_start|>[now(x=[", "olmo3": "<function_calls>now(x=[",
    **{name: form.begin("now")[:-1] for name, form in MARKED.items()}, "openai": "<|channel|><|channel|>to=",
}  # fmt: skip
MAX_HELD_CHARS = (1 << 16) + 2000
SIZE = effort(1500, 4500)


def hostile(name: str, size: int) -> list[str]:
    """Answers of `size` characters that open much and close nothing."""
    units = (HOSTILE[name], "{", "[", '"', "\\", " ", "<", '{"a":', "[[1,")
    return [prefix + unit * (size // len(unit)) for unit in units for prefix in ("", HOSTILE[name])]


@pytest.mark.parametrize("name", FORMATS)
def test_little_of_a_hostile_answer_is_held_back(name):
    for text in hostile(name, 100_000)[:: effort(2, 1)]:
        parser = maker(name)()
        for start in range(0, len(text), 500):
            parser.push(text[start : start + 500])
            if name not in AT_ONCE:  # these judge a call when it has ended
                assert sum(map(len, parser.reader._kept)) + len(parser.reader.text) <= MAX_HELD_CHARS
        parser.finish()


@pytest.mark.parametrize("name", FORMATS)
def test_steps_are_in_proportion_to_the_length(name):
    def num_lines(text: str) -> int:
        """Lines that run while `text` is read, ten characters at a time."""
        count = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        parser = maker(name)()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for start in range(0, len(text), 10):
                parser.push(text[start : start + 10])
            parser.finish()
        finally:
            sys.settrace(before)
        return count

    long_call = FORMATS[name].write([("write_file", {"path": "p", "content": "ab\n" * (SIZE // 3)})])
    for text in [*hostile(name, SIZE), long_call]:
        assert num_lines(text) <= 40 * len(text), text  # a square has more than 70 for a character
