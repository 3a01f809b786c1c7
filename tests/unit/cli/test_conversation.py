"""A conversation whose model calls tools: results go back until the model answers, and never without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.cli.conversation import MAX_CALLS, MAX_ROUNDS, Call, Conversation, Reply
from quire.cli.demo_tools import demo_tools
from quire.cli.streaming import AnswerTimes
from quire.errors import QuireClientError

SUM = Call("calculate", '{"expression": "1 + 2"}')


class ScriptedModel:
    """Replies in turn; the last again and again.

    Attributes:
        asked: the messages of every question.
    """

    def __init__(self, *replies: Reply | QuireClientError) -> None:
        self._replies = list(replies)
        self.asked: list[list[dict[str, Any]]] = []
        self.tools: Sequence[dict[str, Any]] = ()

    def reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Reply:
        self.asked.append(list(messages))
        self.tools = tools
        found = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(found, QuireClientError):
            raise found
        print(found.text)
        return found


def said(text: str, *calls: Call, reason: str = "stop") -> Reply:
    return Reply(text, calls, AnswerTimes(finish_reason=reason))


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_results_go_back_to_the_model_until_it_answers(capsys):
    model = ScriptedModel(said("", SUM), said("And now.", SUM, SUM), said("It is 3."))
    conversation = Conversation(model, "Be brief.", demo_tools())
    conversation.answer("1 + 2?")
    assert roles(model.asked[-1]) == ["system", "user", "assistant", "tool", "assistant", "tool", "tool"]
    _, _, called, result, *_ = model.asked[-1]
    assert called["tool_calls"][0]["function"] == {"name": "calculate", "arguments": SUM.arguments}
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": '{"result": 3}'}
    ids = [call["id"] for message in model.asked[-1] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3
    shown = f'-> calculate {SUM.arguments}\n<- {{"result": 3}}\n'
    assert capsys.readouterr().out == f"\n{shown}And now.\n{shown}{shown}It is 3.\n"
    conversation.answer("Thanks.")
    assert roles(model.asked[-1])[-2:] == ["assistant", "user"] and len(model.asked[-1]) == 9


def test_the_error_of_a_tool_is_a_result_like_any_other():
    model = ScriptedModel(
        said("", Call("calculate", '{"expression": "1/0"}'), Call("rm", "{"), Call("rm", "[]")), said("No.")
    )
    Conversation(model, tools=demo_tools()).answer("1/0?")
    _, called, *results = model.asked[-1]
    assert "division by zero" in results[0]["content"] and "no tool 'rm'" in results[1]["content"]
    assert [call["function"]["arguments"] for call in called["tool_calls"]][1:] == ["{}", "{}"], "others cannot be sent"


def test_a_model_that_goes_on_calling_is_stopped(capsys):
    model = ScriptedModel(said("", SUM))
    conversation = Conversation(model, tools=demo_tools())
    conversation.answer("1 + 2?")
    assert len(model.asked) == MAX_ROUNDS and f"after {MAX_ROUNDS} rounds" in capsys.readouterr().err
    conversation.answer("And?")
    assert roles(model.asked[MAX_ROUNDS])[-2:] == ["tool", "user"]


def test_of_one_round_only_so_many_calls_are_carried_out():
    model = ScriptedModel(said("", *[SUM] * (MAX_CALLS + 2)), said("3"))
    Conversation(model, tools=demo_tools()).answer("?")
    results = [message["content"] for message in model.asked[-1] if message["role"] == "tool"]
    assert results == ['{"result": 3}'] * MAX_CALLS + ['{"error": "too many calls"}'] * 2


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_call_that_was_cut_is_not_carried_out(capsys, reason):
    model = ScriptedModel(said("Well", SUM, reason=reason), said("Yes."))
    conversation = Conversation(model, tools=demo_tools())
    assert conversation.answer("1 + 2?").finish_reason == reason
    assert "was truncated" in capsys.readouterr().err
    conversation.answer("Go on.")
    assert model.asked[-1][1] == {"role": "assistant", "content": "Well"}


def test_a_message_that_is_refused_is_not_remembered_nor_are_the_calls_after_it():
    model = ScriptedModel(said("", SUM), QuireClientError("too long"), said("Yes."))
    conversation = Conversation(model, tools=demo_tools())
    with pytest.raises(QuireClientError):
        conversation.answer("1 + 2?")
    conversation.answer("Hello.")
    assert model.asked[-1] == [{"role": "user", "content": "Hello."}]


def test_without_tools_none_are_offered():
    model = ScriptedModel(said("Hi."))
    Conversation(model).answer("Hello.")
    assert list(model.tools) == []
