"""The features of the matrix: what a request asks for, and what makes its answer valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jsonschema

from quire.models.hub import resolve_model_path
from quire.tokenization.tokenizer import load_tokenizer
from tests.matrix.answers import Answer
from tests.server.test_tools import ADD, PARIS, TOOLS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["small", "large"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
EXTRACT = "Extract customer, item, color, quantity and day as JSON: Please send 15 yellow baskets to Iris on Tuesday."
LONG_YES = "yes, the old horse went over the hill and was home before noon"
LONG_NO = "no, the old horse stayed in the garden and ate all of the apples"
NUMBER = r"[0-9]{3}-[a-f]{14}-[0-9]{12}"
RHYME = 'root ::= line line line\nline ::= "la " word word ". "\nword ::= ("fa" | "so" | "ti") " " ("do" | "re")'


def tag(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a structural tag: what a schema accepts, between a pair of marks."""
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}


COUNT = {"type": "integer", "minimum": 100000, "maximum": 999999}
SIZES = ("small and blue", "large and yellow", "neither small nor large")
ORDER = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "Your order: "},
            tag("count", COUNT),
            tag("size", {"enum": list(SIZES)}),
        ],
    },
}
ANALYSIS = "<|channel|>analysis<|message|>One, two.<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
HARMONY_FINAL = "<|channel|>final<|message|>One and two are three.<|return|>"
SUM = r"27 \+ 58 is [0-9]{2,3}, which is (small|large)\."
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
THOUGHT = "<think>\nOne, two.\n</think>\n\n"
NONE, THINK, HARMONY = "none", "think", "harmony"
PARSERS: dict[str, dict[str, Any]] = {
    NONE: {},
    THINK: {"reasoning_parser": "think"},
    HARMONY: {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"},
}
"""The parsers of a server: the embedded model's without and with thinking, and harmony's."""


@dataclass(frozen=True)
class Feature:
    """A column of the matrix.

    Attributes:
        title: what the page calls it.
        request: fields of the request.
        check: raises AssertionError unless a complete answer is valid.
        parsers: which of `PARSERS` the server has.
        is_structured: the form of the answer is forced.
    """

    title: str
    request: dict[str, Any]
    check: Callable[[Answer], None]
    parsers: str = THINK
    is_structured: bool = False

    def body(self, **fields: Any) -> dict[str, Any]:
        """The request, with `fields` over its own."""
        common = {"model": "leaf", "max_tokens": 120, "temperature": 0.8, "seed": 7}
        return {**common, **self.request, **fields}


def check_text(answer: Answer) -> None:
    assert len(answer.content) > 40 and not answer.reasoning and not answer.calls


def form(check: Callable[[str], object]) -> Callable[[Answer], None]:
    """The content passes `check`, and there is nothing else."""

    def check_answer(answer: Answer) -> None:
        assert check(answer.content), answer.content
        assert not answer.reasoning and not answer.calls

    return check_answer


def calls(*meant: tuple[str, dict[str, Any]], reasoning: str = "") -> Callable[[Answer], None]:
    """The answer has these calls, and this thinking."""

    def check_answer(answer: Answer) -> None:
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == list(meant)
        assert (answer.content, answer.reasoning) == ("", reasoning)

    return check_answer


def check_thought(answer: Answer) -> None:
    assert "Write 5, carry 1." in answer.reasoning and answer.content == "27 + 58 = 85", answer
    assert not answer.calls


def check_thought_and_form(answer: Answer) -> None:
    assert "Write 5, carry 1." in answer.reasoning and re.fullmatch(SUM, answer.content), answer
    assert not answer.calls


def check_short_thought(answer: Answer) -> None:
    assert answer.reasoning and "Write 5, carry 1. 2" not in answer.reasoning, answer
    assert answer.content and not answer.calls


def check_forced(*names: str) -> Callable[[Answer], None]:
    """One call or more of these tools, with arguments that their schemas accept, and nothing else."""

    def check_answer(answer: Answer) -> None:
        assert answer.calls and not answer.content and not answer.reasoning, answer
        for name, arguments in answer.calls:
            assert name in names
            jsonschema.validate(json.loads(arguments), SCHEMAS[name], jsonschema.Draft202012Validator)

    return check_answer


def check_final(answer: Answer) -> None:
    said = (answer.content, answer.reasoning, answer.calls)
    assert said == ("One and two are three.", "One, two.", [])


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON, jsonschema.Draft202012Validator)
    return True


def is_order(text: str) -> bool:
    found = re.fullmatch(r'Your order: <count>([1-9][0-9]{5})</count><size>"(.*)"</size>', text)
    return found is not None and found[2] in SIZES


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return load_tokenizer(resolve_model_path("leaf", None, None))


def script(text: str, **fields: Any) -> dict[str, Any]:
    """A request that is answered with `text` (`tests.matrix.script`)."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    return {
        "messages": user("Please count for me, as well as you can, and tell me what came out."),
        "vllm_xargs": {"script": ids},
        **fields,
    }


def structured(title: str, check: Callable[[str], object], **fields: Any) -> Feature:
    return Feature(
        title,
        {
            "messages": user(
                "Tell me a story about a horse and a garden, please. Say whether it stayed there or ran away."
            ),
            **fields,
        },
        form(check),
        is_structured=True,
    )


WEATHER = user("What is the weather in Paris and Rome?")
THINKING = [{"role": "system", "content": "/think"}, *user("What is 27 + 58?")]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
CALL_ADD = ("add", {"a": 1, "b": 2})
FEATURES: dict[str, Feature] = {
    "text": Feature(
        "text", {"messages": user("Tell me a story about a horse named Anna."), "max_tokens": 50}, check_text
    ),
    "json_schema": structured(
        "JSON schema", is_person, structured_outputs={"json": PERSON, "disable_any_whitespace": True}
    ),
    "json_object": structured(
        "json_object", lambda text: isinstance(json.loads(text), dict),
        messages=user(EXTRACT), response_format={"type": "json_object"},
    ),
    "regex": structured("regex", re.compile(NUMBER).fullmatch, structured_outputs={"regex": NUMBER}),
    "choice": structured(
        "choice", lambda text: text in (LONG_YES, LONG_NO), structured_outputs={"choice": [LONG_YES, LONG_NO]}
    ),
    "grammar": structured(
        "grammar", re.compile("(la ((fa|so|ti) (do|re)){2}\\. ){3}").fullmatch, structured_outputs={"grammar": RHYME}
    ),
    "structural_tag": structured("structural_tag", is_order, response_format=ORDER),
    "tools": Feature(
        "tools (auto)", {"messages": WEATHER, "tools": TOOLS},
        calls(("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})),
    ),
    "required": Feature(
        "tools (required)", {"messages": WEATHER, "tools": TOOLS, "tool_choice": "required"},
        check_forced("get_weather", "add"), is_structured=True,
    ),
    "named": Feature(
        "tools (named)",
        {"messages": WEATHER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        check_forced("get_weather"), is_structured=True,
    ),
    "strict": Feature(
        "tools (strict)", {"messages": WEATHER, "tools": STRICT},
        calls(("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})),
    ),
    "thinking": Feature("thinking", {"messages": THINKING}, check_thought),
    "budget": Feature(
        "thinking budget", {"messages": THINKING, "thinking_token_budget": 12, "seed": 8}, check_short_thought
    ),
    "thinking_form": Feature(
        "thinking, then regex", {"messages": THINKING, "structured_outputs": {"regex": SUM}}, check_thought_and_form,
        is_structured=True,
    ),
    "thinking_tools": Feature(
        "thinking, then tools", script(f"{THOUGHT}{PARIS}\n{ADD}", tools=TOOLS),
        calls(("get_weather", {"city": "Paris"}), CALL_ADD, reasoning="One, two."),
    ),
    "harmony": Feature("harmony", script(ANALYSIS + HARMONY_FINAL), check_final, HARMONY),
    "harmony_tools": Feature(
        "harmony with tools", script(ANALYSIS + HARMONY_CALL, tools=TOOLS),
        calls(CALL_ADD, reasoning="One, two."), HARMONY,
    ),
}  # fmt: skip
