"""What a slow reader gets: everything, in fewer pieces."""

from __future__ import annotations

import asyncio

import pytest

from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
from quire.engine.output_stream import OutputStream


def output(*answers: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("a", None, [1], list(answers), finished)


def answer(index: int, text: str, *ids: int, reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(
        index, text, list(ids), -float(len(ids)), [{i: Logprob(-1.0)} for i in ids], finish_reason=reason
    )


def test_unread_deltas_are_joined_by_answer():
    async def check() -> None:
        stream = OutputStream(is_delta=True)
        first = output(answer(0, "a", 1))
        first.prompt_logprobs = [None]
        stream.put(first)
        stream.put(output(answer(1, "x", 7)))
        stream.put(output(answer(0, "bc", 2, 3, reason="stop"), finished=True))
        found = await stream.get()
        assert [(one.index, one.text, one.token_ids) for one in found.outputs] == [(0, "abc", [1, 2, 3]), (1, "x", [7])]
        assert [list(line) for line in found.outputs[0].logprobs or ()] == [[1], [2], [3]]
        assert found.outputs[0].finish_reason == "stop"
        assert found.prompt_logprobs == [None]
        assert found.finished

    asyncio.run(check())


def test_whole_answers_are_replaced():
    async def check() -> None:
        stream = OutputStream(is_delta=False)
        stream.put(output(answer(0, "a", 1)))
        stream.put(output(answer(0, "ab", 1, 2)))
        assert (await stream.get()).outputs[0].text == "ab"

    asyncio.run(check())


def test_a_reader_waits_for_what_is_new():
    async def check() -> None:
        stream = OutputStream(is_delta=True)
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(output(answer(0, "a", 1)))
        assert (await reader).outputs[0].text == "a"
        stream.put(output(answer(0, "b", 2)))
        assert (await stream.get()).outputs[0].text == "b"

    asyncio.run(check())


def test_an_error_ends_the_stream():
    async def check() -> None:
        stream = OutputStream(is_delta=True)
        stream.put(output(answer(0, "a", 1)))
        stream.fail(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await stream.get()

    asyncio.run(check())


def test_a_reader_is_called_when_there_is_something_again():
    calls = []
    stream = OutputStream(is_delta=True)
    stream.on_ready = lambda: calls.append(stream.is_ready)
    stream.put(output(answer(0, "a", 1)))
    stream.put(output(answer(0, "b", 2)))
    assert calls == [True], "what was not taken is merged without a word"
    taken = stream.take()
    assert taken is not None and taken.outputs[0].text == "ab"
    assert stream.take() is None and not stream.is_ready
    stream.put(output(answer(0, "c", 3)))
    stream.fail(RuntimeError("gone"))
    assert calls == [True, True]
    with pytest.raises(RuntimeError, match="gone"):
        stream.take()


def test_a_reader_that_leaves_hears_no_more_and_ends_the_request_once():
    calls = []
    stream = OutputStream(is_delta=True, on_close=lambda: calls.append("closed"))
    stream.on_ready = lambda: calls.append("ready")
    stream.close()
    stream.close()
    stream.put(output(answer(0, "a", 1)))
    assert calls == ["closed"]
