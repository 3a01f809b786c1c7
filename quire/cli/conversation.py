"""A conversation with a model, which may call tools before it answers. Used by `quire chat`; owns the messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.cli.demo_tools import Toolbox
from quire.cli.streaming import AnswerTimes
from quire.errors import QuireClientError
from quire.parsers.tools import decode

MAX_ROUNDS = 8  # of calls, before the model must have answered
MAX_CALLS = 16  # of one round
CUT = ("length", "abort")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and the JSON text of its arguments, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said: a text and calls, either of which may be empty."""

    text: str
    calls: Sequence[Call]
    times: AnswerTimes


class ChatModel(Protocol):
    """A model, here or on a server."""

    def reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Reply:
        """Write the text of the reply to stdout as it comes; Ctrl-C ends the reply, not the program."""

    def set_parameter(self, name: str, value: Any) -> None:
        """Change a sampling parameter of the replies to come.

        Raises:
            QuireClientError: the value is out of range.
        """


class Conversation:
    """A conversation that is being held.

    Args:
        model: answers.
        system_prompt: first message of the conversation; None = none.
        tools: that the model may call; None = none.

    Attributes:
        parameters: sampling parameters that were set in the conversation.
    """

    def __init__(self, model: ChatModel, system_prompt: str | None = None, tools: Toolbox | None = None) -> None:
        self._model = model
        self._tools = tools or Toolbox([])
        self._system: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []
        self.parameters: dict[str, Any] = {}
        self.set_system_prompt(system_prompt)

    def set_system_prompt(self, text: str | None) -> None:
        """Begin anew with `text` as the system prompt."""
        self._system = [{"role": "system", "content": text}] if text else []
        self._turns = []

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self._turns = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The system prompt, if there is one, and the turns so far."""
        return [*self._system, *self._turns]

    def restore(self, messages: Sequence[dict[str, Any]]) -> None:
        """Continue from `messages`, of which the first may be the system prompt."""
        num_system = 1 if messages and messages[0]["role"] == "system" else 0
        self._system, self._turns = list(messages[:num_system]), list(messages[num_system:])

    def set_parameter(self, name: str, value: Any) -> None:
        """As `ChatModel.set_parameter`; kept in `parameters`."""
        self._model.set_parameter(name, value)
        self.parameters[name] = value

    def answer(self, message: str | None) -> AnswerTimes:
        """Write the answer to `message` to stdout as it comes, with the calls before it and their results.

        None answers the last message again. A message that is refused is not remembered. Returns the times of the last
        reply.

        Raises:
            QuireClientError: the message is refused, or there is none to answer again.
        """
        turns = self._before(message)
        for _ in range(MAX_ROUNDS):
            reply = self._model.reply([*self._system, *turns], self._tools.schemas)
            is_cut = reply.times.finish_reason in CUT
            if not reply.calls or is_cut:
                turns.append({"role": "assistant", "content": reply.text})
                if reply.calls:
                    print(f"the call of {reply.calls[-1].name} was truncated and is not executed", file=sys.stderr)
                break
            turns += self._carried_out(reply, len(turns))
        else:
            print(f"stopped after {MAX_ROUNDS} rounds of tool calls without a reply", file=sys.stderr)
        self._turns = turns
        return reply.times

    def _before(self, message: str | None) -> list[dict[str, Any]]:
        """The turns up to the message that is to be answered."""
        if message is not None:
            return [*self._turns, {"role": "user", "content": message}]
        asked = [index for index, turn in enumerate(self._turns) if turn["role"] == "user"]
        if not asked:
            raise QuireClientError("there is no message to regenerate a reply for", hint="type one first")
        return self._turns[: asked[-1] + 1]

    def _carried_out(self, reply: Reply, number: int) -> list[dict[str, Any]]:
        """The messages of a round: the model's calls and their results."""
        calls = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments if _is_object(call.arguments) else "{}"},
            }
            for index, call in enumerate(reply.calls)
        ]
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": reply.text, "tool_calls": calls}]
        for index, call in enumerate(reply.calls):
            result = self._tools.call(call.name, call.arguments) if index < MAX_CALLS else '{"error": "too many calls"}'
            print(f"-> {call.name} {call.arguments}\n<- {result}", flush=True)
            messages.append({"role": "tool", "tool_call_id": calls[index]["id"], "content": result})
        return messages


def _is_object(arguments: str) -> bool:
    """Whether the arguments can be sent back."""
    try:
        return isinstance(decode(arguments), dict)
    except (ValueError, RecursionError):
        return False
