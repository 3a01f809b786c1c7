"""Parsers by name, of plugins too, and those that chat templates speak of; schemas of parameters."""

from __future__ import annotations

import json
import re

import pytest

from quire.errors import ConfigError
from quire.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    parser_of_template,
    reasoning_parser,
    tool_call_parser,
)
from quire.parsers.tool_calls.pattern import PatternFormat
from quire.parsers.tools import Tools, json_of
from quire.parsers.vllm_names import REASONING_NAMES, TOOL_CALL_NAMES
from tests.unit.parsers.folding import TOOLS, Answer, read

PLUGIN = """
from quire.parsers.base import ReasoningParser, ToolCallParser

class Shout(ToolCallParser):
    def parse(self):
        yield from self.reader.forward_rest(lambda text: self.out.content(text.upper()))

class Nothing(ReasoningParser):
    def parse(self):
        yield from self.reader.forward_rest(self.out.reasoning)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text(PLUGIN)
    info = tmp_path / "shouting-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[quire.tool_parsers]\nshout = shouting:Shout\nlost = shouting:Lost\nwrong = shouting:Nothing\n"
        "[quire.reasoning_parsers]\nall = shouting:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_plugins_parsers_are_found_by_name(plugin):
    assert read(tool_call_parser("shout")(TOOLS), ["a", "b"]) == Answer(content="AB")
    assert read(reasoning_parser("all")(), ["a", "b"]) == Answer(reasoning="ab")


@pytest.mark.parametrize(("name", "words"), [("lost", "has no 'Lost'"), ("wrong", "not derived from ToolCallParser")])
def test_a_plugin_that_is_no_parser_is_refused(plugin, name, words):
    with pytest.raises(ConfigError, match=words):
        tool_call_parser(name)


@pytest.mark.parametrize("find", [tool_call_parser, reasoning_parser])
def test_a_parser_that_only_vllm_has_is_refused_as_that_and_not_as_misspelt(find):
    with pytest.raises(ConfigError, match="kimi_k3' is a vLLM parser that Quire does not implement") as caught:
        find("kimi_k3")
    assert "glm45" in str(caught.value) and "did you mean" not in str(caught.value)


def test_all_names_are_vllms_or_the_projects_own():
    assert {*TOOL_CALL_PARSERS} <= TOOL_CALL_NAMES
    assert {*REASONING_PARSERS} - REASONING_NAMES == {"think"}


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="mistral"):
        tool_call_parser("mistrall")
    with pytest.raises(ConfigError, match="granite"):
        reasoning_parser("granit")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>\\n{\"name\": ..., \"arguments\": ...}", "hermes"),
        ("'<tool_call>\\n{\\\"name\\\": \\\"' + name + '\\\", \\\"arguments\\\": '", "hermes"),
        ("{{- '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\\n<function=' + name + '>\\n<parameter=", "qwen3_coder"),
        ("<｜tool▁calls▁begin｜>...```json", "deepseek_v3"), ("<｜tool▁calls▁begin｜>...", "deepseek_v31"),
        ("<|tool_call|>", "granite"), ("<|python_tag|>{\"name\": x, \"parameters\": y}", "llama3_json"),
        ("<|channel|>commentary to=functions.", "openai"), ("{{ message.content }}", None),
        ("'<tool_call>' + name + '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>'", "glm45"),
        ("'<tool_call>' + name + '<arg_key>' + k + '</arg_key><arg_value>'", "glm47"),
        ("<minimax:tool_call>\\n<invoke name=", "minimax_m2"), ("<seed:tool_call><function=<parameter=", "seed_oss"),
        ("<steptml:invoke name=", "step3"), ("'<' ~ '｜DSML｜' ~ 'tool_calls>'", "deepseek_v4"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
    ],
)  # fmt: skip
def test_the_chat_template_tells_the_format(source, name):
    assert parser_of_template(source) == name
    assert name is None or name in TOOL_CALL_PARSERS


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "007", "007"), ({"type": "string"}, "null", "null"), (None, "5", "5"),
        ({"type": "integer"}, " 7 ", 7), ({"type": "integer"}, "7.5", "7.5"), ({"type": "number"}, "7", 7),
        ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "yes", "yes"), ({"type": "array"}, "[1]", [1]),
        ({"type": "object"}, '{"a": null}', {"a": None}), ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5), ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1"]}, "1", "1"), ({"$ref": "#/x"}, "[1, 2]", [1, 2]), ({}, "text", "text"),
        ({"type": "array"}, "[1e999]", "[1e999]"), ({"type": "array"}, "[" * 9999, "[" * 9999),
        ({"type": "array"}, '["\\ud800"]', ["\ud800"]), ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "float"}, "3.14", 3.14), ({"type": "int"}, "7", 7), ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({"type": "str"}, "7", "7"), ({"type": "bool"}, "true", True), ({"type": "list[int]"}, "[1]", [1]),
        ({"type": "ARRAY"}, "[1]", [1]), ({"type": ["Integer", "none"]}, "null", None), ({"type": "any"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"), ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_a_value_without_quotes_becomes_what_its_schema_says(schema, text, value):
    properties = {} if schema is None else {"x": schema}
    tools = Tools([{"function": {"name": "f", "parameters": {"properties": properties}}}])
    written = json_of(text, tools.types_of("f", "x"))
    assert json.loads(written) == value and written.encode()


def test_malformed_tools_are_tools_without_a_schema():
    for parameters in (None, 5, [], {"properties": []}, {"properties": {"x": 5}}, {"properties": {"x": {"type": 5}}}):
        tools = Tools([{"function": {"name": "f", "parameters": parameters}}, {"function": {}}, {}])
        assert tools.allows("f") and not tools.allows("x") and not tools.allows("")
        assert not tools.types_of("f", "x")
    assert Tools(any_name=True).allows("whatever") and not Tools(any_name=True).allows("")


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"begin": "a", "end": "b"}, "lacks pattern"), ({"begin": "", "end": "b", "pattern": "x"}, "lacks begin"),
        ({"begin": "a", "end": "b", "pattern": "("}, "not a valid regular expression"),
        ({"begin": "a", "end": "b", "pattern": "(?P<name>x)"}, "lacks the group arguments"),
        ({"begin": "a", "end": "b", "patern": "x"}, "pattern"),
    ],
)  # fmt: skip
def test_a_description_that_cannot_be_used_says_why(description, words):
    with pytest.raises(ConfigError) as caught:
        PatternFormat(description)
    assert re.search(words, str(caught.value))
