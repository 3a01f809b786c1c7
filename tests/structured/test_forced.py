"""What a grammar of forced calls lets through, the format's own parser reads: valid calls of allowed tools."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.call_grammar import Literal, Token
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import QuireClientError, UnsupportedError, ValidationError
from quire.parsers.literals import Literals
from quire.parsers.registry import TOOL_CALL_PARSERS, UNFORCED, tool_call_parser
from quire.parsers.tool_calls.pattern import PatternFormat
from quire.parsers.tools import Tools
from quire.server.chat.forcing import CallWriter, grammar_for
from quire.server.chat.protocol.tools import ToolChoice
from quire.server.chat.protocol.warnings import Warnings
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.interface import StructuredOutputBackend, Vocabulary
from quire.structured_output.registry import make_backend
from quire.structured_output.spec import spec_of
from tests.effort import effort
from tests.structured.libraries import needs_libraries
from tests.structured.walks import allowed, text_of, walk
from tests.unit.parsers.folding import read

pytestmark = needs_libraries
FORMATS = [  # each once, under the first of its names
    name
    for index, (name, parser) in enumerate(TOOL_CALL_PARSERS.items())
    if parser not in list(TOOL_CALL_PARSERS.values())[:index] and name not in UNFORCED
]
MARKS = (
    "<|tool_call|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>",
    "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>", "｜DSML｜", "<｜tool_calls_begin｜>",
    "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>",
)  # fmt: skip
EOS = 256


def has_parameters(name: str) -> bool:
    syntax = tool_call_parser(name).syntax()
    return syntax is not None and syntax.parameters is not None


SHORT = {"type": "string", "maxLength": 3}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": SHORT, "days": SMALL},
                                       "required": ["city"]}},
    {"name": "now"},
    {"name": "a.b-c:d/e", "parameters": {"properties": {"unit": {"enum": ["C", "F"]}, "on": {"type": "boolean"}},
                                         "required": ["unit", "on"]}},
    {"name": "plot", "parameters": {"type": "object", "required": ["points"], "properties": {
        "points": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "tag": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]}}}},
]  # fmt: skip
OFFERED = [{"type": "function", "function": one} for one in TOOLS]
_backends: dict[tuple[str, bool], StructuredOutputBackend] = {}


def vocabulary(*, is_special: bool) -> Vocabulary:
    """Bytes, an end, a few longer tokens; the formats' marks are control tokens, or are no tokens at all."""
    pieces = [bytes([byte]) for byte in range(256)] + [
        b"",
        b'{"',
        b'": ',
        b"}\n",
        b"</",
        b"weather",
        b"\n</parameter>\n",
    ]
    special = {len(pieces) + index: mark.encode() for index, mark in enumerate(MARKS)} if is_special else {}
    return Vocabulary((*pieces, *([b""] * len(special))), EOS, special)


def backend(name: str, *, is_special: bool) -> StructuredOutputBackend:
    key = (name, is_special)
    if key not in _backends:
        _backends[key] = make_backend(name, vocabulary(is_special=is_special))
    return _backends[key]


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {piece.decode(): token_id for token_id, piece in vocabulary.special_pieces.items()}


def token_ids(text: str, special: Mapping[str, int]) -> list[int]:
    """Tokens that write `text`: control tokens and bytes."""
    ids: list[int] = []
    for part in Literals(special).of(text):
        if isinstance(part, Token):
            assert isinstance(part.token, int)
            ids.append(part.token)
        else:
            assert isinstance(part, Literal)
            ids += part.value.encode()
    return ids


def check_calls(calls: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Each is a call of one of `tools` with arguments that its schema accepts."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {one["name"]: one.get("parameters") or {} for one in tools}
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict) and name in schemas
        jsonschema.Draft202012Validator(schemas[name]).validate(value)


def check_walks(maker: Any, library: str, *, is_special: bool, is_one: bool, count: int = effort(4, 12)) -> None:
    made = backend(library, is_special=is_special)
    special = special_ids(made.vocabulary)
    config = StructuredOutputsConfig(backend=library)
    choice = ToolChoice(OFFERED, is_required=True, is_one=is_one)
    warnings = Warnings()
    form = grammar_for(choice, None, CallWriter(maker.syntax(special), special, config), warnings)
    spec = spec_of(resolve_structured_outputs(form, config))
    assert not warnings.texts
    grammar = made.load(spec, made.compile(spec))
    num_ended = 0
    for seed in range(count):
        tokens = walk(grammar, made.vocabulary, random.Random(seed), 1500)
        if tokens is None:
            continue
        num_ended += 1
        text = text_of(tokens, made.vocabulary)
        answer = read(maker(Tools(OFFERED)), [text])
        assert answer.content == "" and answer.calls, (text, answer)
        assert len(answer.calls) == 1 or not is_one, text
        check_calls(answer.calls, TOOLS)
        assert read(maker(Tools(OFFERED), buffers_tool_calls=True), list(text)) == answer, "streamed as whole"
    assert num_ended > count // 2


@pytest.mark.parametrize("is_special", [True, False], ids=["control-tokens", "plain-text"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_of_a_format_reads_whatever_its_grammar_lets_through(name: str, is_special: bool):
    for is_one in (True, False):
        check_walks(tool_call_parser(name), "xgrammar", is_special=is_special, is_one=is_one)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai" and not has_parameters(name)])
def test_llguidance_writes_the_same_calls(name: str):
    for is_one in (True, False):
        check_walks(tool_call_parser(name), "guidance", is_special=True, is_one=is_one, count=effort(3, 6))


@pytest.mark.parametrize("library", ["xgrammar", "guidance"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_weak_model_cannot_write_white_space_in_a_call_until_its_tokens_are_spent(name: str, library: str):
    if (name, library) == ("qwen3_coder", "guidance"):
        pytest.skip("not known to it")
    made = backend(library, is_special=False)
    config = StructuredOutputsConfig(backend=library)
    choice = ToolChoice([OFFERED[3]], is_required=True, is_one=True)
    spec = spec_of(
        resolve_structured_outputs(
            grammar_for(choice, None, CallWriter(tool_call_parser(name).syntax(), {}, config), Warnings()), config
        )
    )
    begun = {
        "hermes": '<tool_call>\n{"name": "plot", "arguments": {"points":',
        "qwen3_coder": "<tool_call>\n<function=plot>\n<parameter=points>\n[",
    }[name]
    grammar = made.load(spec, made.compile(spec)).start()
    line = np.empty((1, made.vocabulary.bitmask_size), dtype=np.int32)
    for byte in begun.encode():
        assert grammar.accept(byte), begun
    grammar.fill_bitmask(line, 0)
    assert ord(" ") in allowed(line[0], EOS) and grammar.accept(ord(" "))
    grammar.fill_bitmask(line, 0)
    assert not {*b" \t\n\r"} & set(allowed(line[0], EOS).tolist())


def test_a_format_that_cannot_be_forced_is_refused():
    choice = ToolChoice(OFFERED, is_required=True)
    silent = PatternFormat({"begin": "<c>", "end": "</c>", "pattern": "(?P<name>\\w+)(?P<arguments>.*)"})
    for maker in (tool_call_parser("pythonic"), silent):
        with pytest.raises(UnsupportedError, match="cannot be forced") as caught:
            grammar_for(choice, None, CallWriter(maker.syntax(), {}, StructuredOutputsConfig()), Warnings())
        assert caught.value.field == "tool_choice"


def test_a_format_of_ones_own_is_forced_when_it_says_how_calls_are_written():
    described = {"begin": "<c>", "end": "</c>", "pattern": r"\s*(?P<name>[^(]+)\((?P<arguments>.*)\)\s*"}
    check_walks(
        PatternFormat({**described, "call": "\n{name}({arguments})\n"}), "xgrammar", is_special=False, is_one=False
    )
    for wrong in ("{name}", "{arguments}{name}", "{name}[{arguments}]", 5):
        with pytest.raises(QuireClientError, match="call of the tool call format"):
            PatternFormat({**described, "call": wrong})


ODD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "format": "no-such"}}}


REFUSED: dict[str, tuple[Any, str]] = {
    "unsupported": ({**ODD, "not": {"required": ["b"]}}, "#/not"),
    "remote": ({"properties": {"a": {"$ref": "http://example.test/a.json"}}}, "#/properties/a/$ref"),
    "unresolved": ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "#/properties/a/$ref"),
    "unknown": ({"properties": {"a": {"requried": []}}}, "#/properties/a/requried"),
    "type": ({"properties": {"a": {"type": "text"}}}, "#/properties/a/type"),
    "number": ({"properties": {"a": {"type": "integer", "minimum": 10**400}}}, "#/properties/a/minimum"),
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_call_is_not_forced_by_a_schema_that_a_response_format_cannot_have(name: str, kind: str):
    (schema, path), config = REFUSED[kind], StructuredOutputsConfig()
    writer = CallWriter(tool_call_parser(name).syntax(), {}, config)
    function: dict[str, Any] = {"name": "f", "parameters": schema}
    with pytest.raises(ValidationError, match=re.escape(path)):
        resolve_structured_outputs(StructuredOutputsParams(json=schema), config)
    for choice in (ToolChoice([{"type": "function", "function": function}], is_required=True, is_one=one)
                   for one in (False, True)):  # fmt: skip
        with pytest.raises(ValidationError, match=re.escape(path)) as caught:
            grammar_for(choice, None, writer, Warnings())
        assert caught.value.field == "tools" and "tools f.function.parameters" in str(caught.value)
    shown = ToolChoice([{"type": "function", "function": function}])
    assert grammar_for(shown, None, writer, Warnings()) is None  # nothing is to follow it
    function["strict"] = True
    with pytest.raises(ValidationError, match=f"strict.*{re.escape(path)}"):
        grammar_for(shown, None, writer, Warnings())


def test_schemas_that_no_backend_honours_together_are_followed_as_far_as_one_does():
    one_of = {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "string"}]}}}
    names = {"type": "object", "propertyNames": {"pattern": "[a-z]+"}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
             for name, schema in (("f", one_of), ("g", names))]  # fmt: skip
    warnings = Warnings()
    writer = CallWriter(tool_call_parser("hermes").syntax(), {}, StructuredOutputsConfig())
    assert grammar_for(ToolChoice(tools, is_required=True), None, writer, warnings) is not None
    assert len(warnings.texts) == 1


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_beside_a_response_format_a_schema_that_cannot_be_followed_is_an_error_for_strict_functions_alone(name: str):
    writer, warnings = CallWriter(tool_call_parser(name).syntax(), {}, StructuredOutputsConfig()), Warnings()
    function: dict[str, Any] = {"name": "f", "parameters": {**ODD, "not": {"required": ["b"]}}}
    choice = ToolChoice([{"type": "function", "function": function}])
    form = grammar_for(choice, StructuredOutputsParams(json_object=True), writer, warnings)
    assert "/not" in warnings.texts[0] and "tools f" in warnings.texts[0]
    assert resolve_structured_outputs(form, StructuredOutputsConfig()).backend == "xgrammar"
    function["strict"] = True
    with pytest.raises(ValidationError, match="strict.*not") as caught:
        grammar_for(choice, StructuredOutputsParams(json_object=True), writer, Warnings())
    assert caught.value.field == "tools"


TEXTS: dict[str, dict[str, Any]] = {
    "free": {"type": "string"},
    "undescribed": {},
    "enum": {"enum": ["a b", "<tag>", "5"], "type": "string"},
    "const": {"const": "x"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "or-null": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    "or-number": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
    "number": {"type": "number", "minimum": -1, "maximum": 1},
    "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "shared": {"$ref": "#/$defs/small"},
}


@pytest.mark.parametrize("kind", TEXTS)
def test_parameters_that_are_marked_one_by_one_have_the_values_that_their_schemas_allow(kind: str):
    schema = {"type": "object", "properties": {"v": TEXTS[kind]}, "required": ["v"], "$defs": {"small": SMALL}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    maker, config, made = (
        tool_call_parser("qwen3_coder"),
        StructuredOutputsConfig(),
        backend("xgrammar", is_special=False),
    )
    warnings = Warnings()
    form = grammar_for(
        ToolChoice(tools, is_required=True, is_one=True), None, CallWriter(maker.syntax(), {}, config), warnings
    )
    spec = spec_of(resolve_structured_outputs(form, config))
    grammar = made.load(spec, made.compile(spec))
    walks = [walk(grammar, made.vocabulary, random.Random(seed), 3000) for seed in range(30)]
    texts = [text_of(tokens, made.vocabulary) for tokens in walks if tokens is not None]
    assert texts and not warnings.texts
    for text in texts:
        answer = read(maker(Tools(tools)), [text])
        assert len(answer.calls) == 1 and not answer.content, text
        check_calls(answer.calls, [{"name": "f", "parameters": schema}])


@pytest.mark.parametrize("is_special", [True, False], ids=["control-tokens", "plain-text"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("openai", "xlam")])
def test_calls_of_strict_functions_are_valid_wherever_they_begin_in_a_text(name: str, is_special: bool):
    maker, made = tool_call_parser(name), backend("xgrammar", is_special=is_special)
    special = special_ids(made.vocabulary)
    strict = [{"type": "function", "function": {**one, "strict": one["name"] != "plot"}} for one in TOOLS]
    syntax, warnings = maker.syntax(special), Warnings()
    assert syntax is not None
    num_calls = 0
    for is_one in (True, False):
        form = grammar_for(
            ToolChoice(strict, is_one=is_one), None, CallWriter(syntax, special, StructuredOutputsConfig()), warnings
        )
        assert form is not None and not warnings.texts
        spec = spec_of(resolve_structured_outputs(form, StructuredOutputsConfig()))
        grammar = made.load(spec, made.compile(spec))
        openers = [special.get(text) for text in syntax.openers]
        word = token_ids(syntax.begin or syntax.head, special)
        for seed in range(effort(5, 12)):
            rng = random.Random(seed)
            state, line, tokens = grammar.start(), np.empty((1, made.vocabulary.bitmask_size), dtype=np.int32), []
            while len(tokens) < 700:
                state.fill_bitmask(line, 0)
                ids = allowed(line[0], made.vocabulary.vocab_size).tolist()
                if len(ids) > 150 and rng.random() < 0.3:  # free text, where a call is to begin now and then
                    wanted = [one for one in openers if one in ids]
                    written = wanted[:1] or (word if not is_special or not wanted else [])
                    for token_id in written:
                        if state.accept(token_id):
                            tokens.append(token_id)
                        else:
                            break
                    continue
                token_id = EOS if EOS in ids and len(tokens) > effort(60, 700) else rng.choice(ids)
                assert state.accept(token_id)
                if token_id == EOS:
                    break
                tokens.append(token_id)
            else:
                continue
            answer = read(maker(Tools(OFFERED)), [text_of(tokens, made.vocabulary)])
            num_calls += len(answer.calls)
            assert len(answer.calls) <= 1 or not is_one
            check_calls([call for call in answer.calls if call[0] != "plot"], TOOLS)
            for call in answer.calls:
                assert isinstance(json.loads(call[1]), dict)
            for opener in syntax.openers:
                assert opener not in answer.content, answer
    assert num_calls


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_an_answer_that_may_be_json_or_calls_is_one_of_them(name: str):
    maker, made = tool_call_parser(name), backend("xgrammar", is_special=True)
    special, config = special_ids(made.vocabulary), StructuredOutputsConfig()
    schema = {"type": "object", "properties": {"n": SMALL}, "required": ["n"]}
    asked = StructuredOutputsParams(json=schema, source="response_format")
    form = grammar_for(ToolChoice(OFFERED), asked, CallWriter(maker.syntax(special), special, config), Warnings())
    spec = spec_of(resolve_structured_outputs(form, config))
    grammar = made.load(spec, made.compile(spec))
    kinds = set()
    for seed in range(30):
        tokens = walk(grammar, made.vocabulary, random.Random(seed), 1500)
        if tokens is None:
            continue
        answer = read(maker(Tools(OFFERED)), [text_of(tokens, made.vocabulary)])
        kinds.add(bool(answer.calls))
        check_calls(answer.calls, TOOLS)
        assert answer.calls or 0 <= json.loads(answer.content)["n"] <= 99
        assert not answer.calls or not answer.content
    assert kinds == {True, False}


def test_another_form_beside_tools_stays_and_a_warning_says_so():
    warnings = Warnings()
    asked = StructuredOutputsParams(regex="a+")
    assert grammar_for(ToolChoice(OFFERED), asked, CallWriter(None, {}, StructuredOutputsConfig()), warnings) is asked
    assert "not a tool call" in warnings.texts[0]
