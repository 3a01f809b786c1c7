"""Structured output over HTTP, behind the embedded model: what an answer's form says, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from tests.server.servers import RunningServer
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
TAG: dict[str, Any] = {
    "type": "tag", "begin": "<f>", "end": "</f>", "content": {"type": "json_schema", "json_schema": SCHEMA},
}  # fmt: skip
CALL = re.compile(r"<f>(\{\s*\"a\"\s*:\s*\d{1,2}\s*\})</f>")
TAGS: dict[str, dict[str, Any]] = {
    "begins at once": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True,
                       "stop_after_first": True},
    "one after another": {"type": "tags_with_separator", "separator": ";", "tags": [TAG], "at_least_one": True,
                          "stop_after_first": False},
    "after a text": {"type": "sequence", "elements": [{"type": "const_string", "value": "Well: "}, TAG]},
    "one of two": {"type": "or", "elements": [TAG, {"type": "tag", "begin": "<g>", "content":
                   {"type": "regex", "pattern": "[xy]{2}"}, "end": "</g>"}]},
}  # fmt: skip
FORMS = {
    "begins at once": CALL.pattern,
    "one after another": f"{CALL.pattern}(;{CALL.pattern})*",
    "after a text": f"Well: {CALL.pattern}",
    "one of two": f"{CALL.pattern}|<g>[xy]{{2}}</g>",
}


@pytest.fixture(scope="module")
def leaf() -> Iterator[RunningServer]:
    config = build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False)
    engine = AsyncLLM.from_config(config)
    with RunningServer(engine) as server:
        yield server
    engine.shutdown()


def write(server: RunningServer, **fields: Any) -> tuple[str, str | None]:
    """Text and finish_reason of a chat, whole; a stream must come to the same."""
    asked: dict[str, Any] = {
        "model": "leaf", "messages": [{"role": "user", "content": PROMPT}], "seed": 3, "temperature": 1.0,
        "max_tokens": 120, **fields,
    }  # fmt: skip
    client = server.client()
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [one.choices[0] for one in client.chat.completions.create(**asked, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    return whole.message.content or "", whole.finish_reason


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_a_structural_tag_is_followed_whole_and_streamed(leaf: RunningServer, name: str, field: str):
    tag = {"type": "structural_tag", "format": TAGS[name]}
    asked = {"response_format": tag} if field == "response_format" else {
        "extra_body": {"structured_outputs": {"structural_tag": tag}}
    }  # fmt: skip
    for seed in (3, 4):
        text, reason = write(leaf, seed=seed, **asked)
        if reason == "stop":
            assert re.fullmatch(FORMS[name], text), text
        else:
            assert reason == "length" and name == "one after another"
        for call in CALL.findall(text):
            assert set(json.loads(call[0] if isinstance(call, tuple) else call)) == {"a"}


def test_free_text_becomes_a_schema_where_a_trigger_is_written(leaf: RunningServer):
    """The older form of a tag; the trigger is a text that the model writes soon."""
    structures = [{"begin": " a", "schema": SCHEMA, "end": "."}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": [" a"]}
    tale = [{"role": "user", "content": "Tell me a story."}]
    text, _ = write(leaf, messages=tale, temperature=0, response_format=tag, max_tokens=80)
    assert " a" in text, text
    for part in text.split(" a")[1:-1]:
        assert set(json.loads(part[: part.index("}") + 1])) == {"a"}, text


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        (
            {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [{**TAG, "end_": "x"}]}},
            "/format/tags/0/end_",
        ),
        ({"format": {"type": "tag_", "begin": "a"}}, "/format/type"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "/format/pattern"),
        ({"structures": [{"begin": "a"}], "triggers": []}, "/structures/0"),
        ({"format": {**TAG, "begin": 3}}, "/format/begin"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_structural_tag_that_would_be_read_otherwise_is_refused_by_its_place(
    leaf: RunningServer, tag: dict[str, Any], word: str
):
    with pytest.raises(openai.BadRequestError, match=re.escape(word)) as caught:
        write(leaf, response_format={"type": "structural_tag", **tag})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [100, 101]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2]}, "allowed_token_ids"),
        ({"bad_words": ["yes", "ye", "y"]}, "bad_words"),
        ({"min_tokens": 60}, "min_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_fields_that_leave_a_form_no_token_are_named_with_400(leaf: RunningServer, fields: dict[str, Any], param: str):
    body = {"structured_outputs": {"choice": ["yes"]}, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        write(leaf, extra_body=body)
    assert caught.value.param == param and caught.value.status_code == 400


WRONG = {"type": "object", "not": {"required": ["a"]}}
NAMED = {"type": "json_schema", "name": "a", "schema": WRONG}
MESSAGE = {"model": "leaf", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
OF_EVERY_API = [
    ("/v1/chat/completions", "response_format", {**MESSAGE, "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": WRONG}}}),
    ("/v1/responses", "text.format", {"model": "leaf", "input": "Hi", "text": {"format": NAMED}}),
    ("/v1/messages", "output_config.format", {**MESSAGE, "output_config": {"format": {
        "type": "json_schema", "schema": WRONG}}}),
    ("/v1/messages", "output_format", {**MESSAGE, "output_format": {"type": "json_schema", "schema": WRONG}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "body"), OF_EVERY_API, ids=[name for _, name, _ in OF_EVERY_API])
def test_errors_of_a_schema_call_its_field_as_the_api_does(
    leaf: RunningServer, path: str, name: str, body: dict[str, Any]
):
    answer = httpx.post(leaf.url + path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and f"supports {name} (" in error["message"], error
    assert error.get("param", name) in (name, "text")
    both = httpx.post(leaf.url + path, json={**body, "structured_outputs": {"choice": ["a"]}}).json()["error"]
    assert f"{name} and structured_outputs both constrain" in both["message"]
