"""The reader of streams: times of tokens, who counted them, and everything that is no whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.bench.answer_stream import AnswerReader, EventSplitter, refusal

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str, reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": content, "finish_reason": reason, **fields}])


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def read(*parts: bytes) -> AnswerReader:
    """Part number i comes at second i."""
    reader = AnswerReader()
    for second, part in enumerate(parts):
        reader.feed(part, float(second))
    reader.end(float(len(parts)))
    return reader


def test_events_are_split_wherever_they_are_cut():
    stream = b': comment\n\ndata: {"a": 1}\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\ndata: last\n\n'
    for at in range(len(stream)):
        splitter = EventSplitter()
        assert splitter.feed(stream[:at]) + splitter.feed(stream[at:]) == [b'{"a": 1}', b"two\nlines", b"last"]


def test_an_endless_event_is_refused():
    splitter = EventSplitter()
    with pytest.raises(ValueError, match="16 MiB"):
        splitter.feed(b"data: " + b"x" * (1 << 24))


def test_each_event_with_tokens_has_its_time():
    reader = read(text("a"), text("b") + text("c"), b": ping\n\n", text("", "length"), event(choices=[]), DONE)
    assert reader.event_times == [0.0, 1.0, 1.0]
    assert reader.last_choice_s == 3.0 and reader.failure is None


def test_a_completion_event_without_text_is_a_token_too():
    assert read(text(""), text("é"), text("", "stop"), DONE).event_times == [0.0, 1.0]


def test_the_role_of_a_chat_is_no_token_but_reasoning_and_calls_are():
    reader = read(
        delta(role="assistant", content=""), delta(reasoning="hm"), delta(reasoning_content="so"),
        delta(content="42"), delta(tool_calls=[{"index": 0}]), delta("stop"), DONE,
    )  # fmt: skip
    assert reader.event_times == [1.0, 2.0, 3.0, 4.0] and reader.last_choice_s == 5.0


def test_usage_counts_the_tokens_and_wins_over_their_ids():
    reader = read(
        text("a", token_ids=[1]), text("bc", "stop", token_ids=[2, 3]),
        event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}), DONE,
    )  # fmt: skip
    assert reader.output_tokens == (4, "usage") and reader.num_prompt_tokens == 9


def test_without_usage_the_ids_count_and_without_both_nobody_does():
    assert read(text("a", token_ids=[1]), text("bc", "stop", token_ids=[2, 3]), DONE).output_tokens == (3, "token_ids")
    reader = read(text("a"), text("b", "stop"), DONE)
    assert reader.output_tokens == (None, "") and reader.num_prompt_tokens is None and reader.failure is None


@pytest.mark.parametrize(
    ("parts", "kind", "word"),
    [
        ([text("a"), event(error={"message": "out of luck"}), DONE], "error event", "out of luck"),
        ([event(error="plain")], "error event", "plain"),
        ([text("a"), b"data: {broken\n\n"], "malformed event", "JSON"),
        ([b'data: {"choices": 7}\n\n'], "malformed event", "choices"),
        ([b"data: \xff\xfe\n\n"], "malformed event", ""),
        ([text("a")], "incomplete stream", "finish_reason"),
        ([], "incomplete stream", ""),
        ([DONE], "empty response", "token"),
        ([text("a"), text("", "abort"), DONE], "aborted", "abort"),
        ([text("a"), text("", "error"), DONE], "aborted", "error"),
    ],
    ids=["error", "error text", "broken JSON", "wrong type", "no UTF-8", "cut", "nothing", "empty", "abort", "failed"],
)
def test_what_is_no_whole_answer_has_a_kind_and_a_message(parts: list[bytes], kind: str, word: str):
    failure = read(*parts).failure
    assert failure is not None and failure.kind == kind and word in failure.message


def test_an_answer_whose_first_token_ends_it_is_an_answer():
    reader = read(delta(role="assistant", content=""), delta("stop"), DONE)
    assert reader.failure is None and reader.event_times == [1.0]


def test_a_stream_may_end_without_done_or_a_blank_line():
    assert read(text("a", "stop")).failure is None
    assert read(text("a"), b"data: [DONE]").failure is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"", "no text"),
        (b"[1]", "[1]"),
    ],
)
def test_a_refusal_is_named_by_its_status(body: bytes, message: str):
    failure = refusal(502, body)
    assert (failure.kind, failure.message) == ("status 502", message)
