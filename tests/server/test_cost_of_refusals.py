"""Refusing a request costs little, however large the value that is refused. Costs are counted, not timed."""

from __future__ import annotations

import difflib
import json
import tracemalloc
from collections.abc import Callable

import pytest

from quire.core.inputs import parse_messages
from quire.errors import UnsupportedError, ValidationError, nearest, unknown_name
from quire.server.api.openai.protocol.completion import COMPLETION_FIELDS
from quire.server.chat.protocol.reading import read_object, read_request
from quire.server.chat.protocol.warnings import MAX_WARNINGS
from quire.server.http.errors import api_error_of
from quire.utils.checks import shown
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of, post

LIMITS = {"max_depth": 64, "max_containers": 10_000, "is_strict": False}


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """Lengths of the names that were looked up among the valid ones."""
    found: list[int] = []
    compare = difflib.get_close_matches

    def counted(word: str, *arguments: object, **options: object) -> list[str]:
        found.append(len(word))
        return compare(word, *arguments, **options)

    monkeypatch.setattr("difflib.get_close_matches", counted)
    return found


def test_thousands_of_unknown_fields_are_not_each_compared_with_the_known_ones(compared):
    body = json.dumps({"prompt": "a", **{f"k{i}": 0 for i in range(3000)}}).encode()
    _, warnings = read_request(body, COMPLETION_FIELDS, **LIMITS)
    assert len(warnings.texts) == len(compared) == MAX_WARNINGS


def test_a_field_that_is_not_supported_is_refused_behind_thousands_of_unknown_ones():
    body = json.dumps({"prompt": "a", **{f"k{i}": 0 for i in range(3000)}, "best_of": 3}).encode()
    with pytest.raises(UnsupportedError, match="best_of"):
        read_request(body, COMPLETION_FIELDS, **LIMITS)


def test_an_overlong_name_is_compared_with_nothing(compared):
    long = "ab" * 100_000
    assert nearest(long, ["role"]) is None
    assert len(str(unknown_name("field", long, ["role"]))) < 400
    with pytest.raises(ValidationError):
        parse_messages([{"role": "user", "content": "x", long: 1}])
    with pytest.raises(ValidationError):
        parse_messages([{"role": long, "content": "x"}])
    assert not compared


def test_only_the_beginning_of_a_value_is_written_into_a_message():
    assert shown([1, "a", {"b": None}, (2.5,)]) == "[1, 'a', {'b': None}, (2.5,)]"
    assert shown("x" * 200) == f"{'x' * 80!r}"[:80] + "..."
    tracemalloc.start()
    for value in ([0] * 10**6, {str(i): 0 for i in range(10**5)}, [["x" * 10**6] * 3] * 100, 10**9000):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert len(shown(value)) < 100
        assert tracemalloc.get_traced_memory()[1] - before < 4_000_000
    tracemalloc.stop()


BRACKETS: dict[str, tuple[Callable[[int], bytes], bool]] = {
    "empty objects": (lambda n: b'{"prompt":[' + b"{}," * n + b"0]}", False),
    "empty lists": (lambda n: b'{"prompt":[' + b"[]," * n + b"0]}", False),
    "in a text": (lambda n: b'{"prompt":"' + b"[" * n + b'"}', True),
    "behind an escaped quote": (lambda n: b'{"prompt":"\\"' + b"[" * n + b'"}', True),
    "behind an escaped backslash": (lambda n: b'{"prompt":"\\\\","a":[' + b"[]," * n + b"0]}", False),
}


@pytest.mark.parametrize(("body", "is_text"), BRACKETS.values(), ids=BRACKETS.keys())
def test_a_body_of_countless_parts_is_refused_before_they_are_made(body, is_text, monkeypatch):
    assert "prompt" in read_object(body(900), 64, 1000)
    decoded = []
    monkeypatch.setattr("msgspec.json.decode", lambda text: decoded.append(text) or {})
    if is_text:
        read_object(body(2000), 64, 1000)
    else:
        with pytest.raises(ValidationError, match="more than 1000 lists and objects"):
            read_object(body(2000), 64, 1000)
    assert bool(decoded) == is_text


@pytest.fixture
def counted():
    """A server, and the lengths of the texts that its tokenizer was given."""
    engine = ScriptedEngine()
    lengths: list[int] = []
    encode = engine.tokenizer.encode

    def counting(text, *arguments, **options):
        lengths.append(len(text))
        return encode(text, *arguments, **options)

    engine.tokenizer.encode = counting
    with RunningServer(engine) as server:
        yield server, lengths


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(counted):
    server, lengths = counted
    text = "a " * 200_000
    message = {"messages": [{"role": "user", "content": text}]}
    cases = [("/v1/completions", {"prompt": text}), (CHAT, message), ("/tokenize", {"prompt": text}),
             ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5})]  # fmt: skip
    for path, body in cases:
        answer = post(server, path, body)
        assert answer.status_code == 400 and "characters" in error_of(answer)["message"]
    assert not lengths
    ids = post(server, "/v1/completions", {"prompt": [5] * 300_000, "truncate_prompt_tokens": 5})
    assert ids.status_code == 400 and "300000 tokens" in error_of(ids)["message"]
    assert post(server, "/tokenize", {"prompt": text[:200_000]}).json()["count"] > 2048
    assert post(server, CHAT, HELLO).status_code == 200


LARGE = {
    "bad_words": ["ab " * 200] * 40,
    "vllm_xargs": {"a": [0] * 40_000},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 600_000}}}],
    "documents": [{"text": "x" * 1_100_000}],
    "chat_template_kwargs": {"a": [0] * 600_000},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 1_100_000}]}],
}


@pytest.mark.parametrize("name", LARGE)
def test_what_cannot_fit_is_refused_before_its_parts_are_looked_at(counted, name, monkeypatch):
    server, lengths = counted
    seen: list[object] = []
    monkeypatch.setattr("quire.server.chat.prompts.parse_messages", lambda messages: seen.append(messages) or [])
    monkeypatch.setattr("quire.core.sampling_params.check_plain", lambda *value: seen.append(value))
    answer = post(server, CHAT, {**HELLO, "tool_choice": "none", name: LARGE[name]})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == (name if name in ("bad_words", "vllm_xargs") else "messages")
    assert not seen and not lengths


def test_ids_without_end_are_refused_before_they_are_decoded(server):
    assert post(server, "/detokenize", {"tokens": [5] * 300_000}).status_code == 400
    assert len(post(server, "/detokenize", {"tokens": [5] * 10_000}).json()["prompt"]) >= 10_000


def test_a_long_message_is_cut_before_it_is_searched():
    assert len(api_error_of(ValidationError("/a/b" * 10**6)).message) <= 1000
