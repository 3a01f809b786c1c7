from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.inputs import PROMPT_KEYS_NOT_YET, TextPrompt, TokensPrompt, parse_messages, parse_prompt
from quire.errors import QuireClientError, UnsupportedError, ValidationError


def test_every_form_of_a_prompt() -> None:
    assert parse_prompt("hello") == TextPrompt("hello")
    assert parse_prompt({"prompt": "hello", "cache_salt": "me"}) == TextPrompt("hello", "me")
    assert parse_prompt([1, 2]) == TokensPrompt((1, 2))
    assert parse_prompt(np.array([1, 2], dtype=np.int32)) == TokensPrompt((1, 2))
    assert parse_prompt({"prompt_token_ids": [1], "prompt": "a"}) == TokensPrompt((1,), "a")
    parsed = TextPrompt("again")
    assert parse_prompt(parsed) is parsed


BAD_PROMPTS = {
    "empty text": ("", "prompt is empty"),
    "empty text in a dict": ({"prompt": ""}, "prompt is empty"),
    "empty ids": ([], "prompt_token_ids is empty"),
    "nothing": (None, "prompt must be"),
    "a number": (5, "prompt must be"),
    "bytes": (b"x", "prompt must be"),
    "texts instead of ids": (["a", "b"], "not of token ids"),
    "a conversation instead of a prompt": ([{"role": "user", "content": "x"}], "not of token ids"),
    "negative id": ([1, -1], "prompt_token_ids\\[1\\]=-1"),
    "float id": ([1.5], "prompt_token_ids\\[0\\] must be an integer"),
    "bool id": ([True], "prompt_token_ids\\[0\\] must be an integer"),
    "id beyond 32 bits": ([2**31], "out of range"),
    "ids a number": ({"prompt_token_ids": 5}, "a list of integers"),
    "ids a text": ({"prompt_token_ids": "12"}, "a list of integers"),
    "ids a dict": ({"prompt_token_ids": {0: 1}}, "a list of integers"),
    "two-dimensional ids": (np.zeros((2, 2), dtype=np.int64), "prompt must be"),
    "unknown key": ({"promt": "x"}, "did you mean 'prompt'"),
    "neither text nor ids": ({"cache_salt": "x"}, "neither"),
    "text of a wrong type": ({"prompt": 5}, "prompt must be a string"),
    "salt of a wrong type": ({"prompt": "x", "cache_salt": 5}, "cache_salt must be"),
    "salt with a slash": ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
    "salt too long": ({"prompt": "x", "cache_salt": "a" * 129}, "cache_salt"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused_in_words(prompt: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        parse_prompt(prompt)
    assert caught.value.field and caught.value.hint


@pytest.mark.parametrize("key", PROMPT_KEYS_NOT_YET)
def test_a_known_prompt_key_that_is_not_honoured_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        parse_prompt({"prompt": "x", key: [1]})


def test_messages_come_back_in_the_form_templates_read() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
    ]
    parsed = parse_messages(messages)
    assert parsed[0] == {"role": "system", "content": "be brief"}
    assert parsed[1]["content"] == "one\ntwo"
    assert parsed[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert parsed[3]["tool_call_id"] == "1"
    assert parsed[4]["reasoning_content"] == "one and one"


def test_an_answer_may_be_empty_and_a_role_the_template_s_own() -> None:
    messages = [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "critic", "content": "x"},
    ]
    parsed = parse_messages(messages)
    assert [one["content"] for one in parsed] == ["", "", "", "x"]
    assert parsed[2]["reasoning_content"] == "hm" and parsed[3]["role"] == "critic"


USER = {"role": "user", "content": "x"}
BAD_MESSAGES = {
    "no list": ("hello", "messages must be"),
    "no messages": ([], "messages is empty"),
    "too many": ([USER] * 16385, "at most 16384"),
    "message is a text": (["hello"], r"messages\[0\] must be"),
    "no role": ([{"content": "x"}], r"messages\[0\].role must be"),
    "role is empty": ([USER, {"role": "", "content": "x"}], "1 to 64 characters"),
    "role is several lines": ([{"role": "user\n", "content": "x"}], "1 to 64 characters"),
    "unknown key": ([{"role": "user", "contnt": "x"}], "did you mean 'content'"),
    "no content": ([{"role": "user"}], r"messages\[0\] has no content"),
    "content a number": ([{"role": "user", "content": 5}], "content must be"),
    "unknown part": ([{"role": "user", "content": [{"type": "smell"}]}], "part type"),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
    "part a number": ([{"role": "user", "content": [5]}], r"content\[0\] must be"),
    "calls not a list": ([{"role": "assistant", "tool_calls": {"a": 1}}], "a list of tool calls"),
    "call without function": ([{"role": "assistant", "tool_calls": [{}]}], "function"),
    "call with broken arguments": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "not JSON",
    ),
    "call with arguments that are no object": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        "JSON object",
    ),
    "call with an unknown key": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "typ": "function"}]}],
        "did you mean 'type'",
    ),
}


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_bad_messages_are_refused_in_words(messages: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        parse_messages(messages)
    assert caught.value.field and caught.value.hint


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_parts_that_are_not_text_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        parse_messages([{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "name", "type", "text", "function", "user", "prompt"])
MESSAGE_LIKE = st.lists(st.dictionaries(KEYS, JSON | st.sampled_from(["user", "assistant"]), max_size=4), max_size=3)


@settings(deadline=None, max_examples=200)
@given(JSON | MESSAGE_LIKE | st.dictionaries(KEYS | st.just("prompt_token_ids"), JSON))
def test_whatever_is_passed_is_parsed_or_refused_with_the_fields_name(value: object) -> None:
    for parse in (parse_prompt, parse_messages):
        try:
            parse(value)
        except QuireClientError as error:
            assert error.field is not None and error.hint
