"""The model of a conversation in this process. Used by `quire chat`; no state but the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.cli.conversation import Call, Reply
from quire.cli.streaming import AnswerStream
from quire.core.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.errors import ChatTemplateError, ConfigError
from quire.parsers.base import ToolCallParser
from quire.parsers.events import CallArguments, CallBegin, Event
from quire.parsers.registry import parser_of_template, tool_call_parser
from quire.parsers.tools import Tools


class LocalModel:
    """Answers with an engine.

    Args:
        engine: has a chat template.
        params: of every answer.
        uses_tools: calls are read out of the answers, in the format of the chat template.

    Raises:
        ChatTemplateError: there is no template.
        ConfigError: the template speaks of no format of calls that is known.
    """

    def __init__(self, engine: LLMEngine, params: SamplingParams, *, uses_tools: bool = False) -> None:
        if engine.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template", hint="pass one with --chat-template, or use quire generate --raw"
            )
        self._engine = engine
        self._template = engine.chat_template
        self._params = params
        self._parser: type[ToolCallParser] | None = None
        if uses_tools:
            self._parser = _parser_of(engine)
            if self._needs_special_tokens(self._parser):
                self._params = params.clone()
                self._params.skip_special_tokens = False

    def reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Reply:
        """As `ChatModel.reply`."""
        prompt = self._template.render(messages, tools=tools or None)
        stream = AnswerStream(self._engine, prompt, self._params, add_special_tokens=False)
        written = _Written()
        if self._parser is None:
            for delta in stream:
                written.write(delta)
        else:
            parser = self._parser(Tools(tools))
            for delta in stream:
                written.take(parser.push(delta))
            written.take(parser.finish())
        if written.text or not written.calls:
            print(flush=True)
        calls = [Call(name, "".join(parts)) for name, parts in written.calls]
        return Reply(written.text, calls, stream.times)

    def set_parameter(self, name: str, value: Any) -> None:
        """As `ChatModel.set_parameter`."""
        self._params = msgspec.structs.replace(self._params, **{name: value})

    def _needs_special_tokens(self, parser: type[ToolCallParser]) -> bool:
        """Whether the format is written with control tokens of this vocabulary."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "a chat has a tokenizer"
        special = set(map(tokenizer.token_text, tokenizer.special_ids))
        return parser.needs_special_tokens or not special.isdisjoint(parser.marks)


class _Written:
    """A reply as it comes.

    Attributes:
        calls: (name, parts of the arguments).
    """

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[tuple[str, list[str]]] = []

    def write(self, text: str) -> None:
        """More text."""
        self.text += text
        print(text, end="", flush=True)

    def take(self, events: Sequence[Event]) -> None:
        """What was read out of the answer; thinking is shown as text."""
        for event in events:
            if isinstance(event, CallBegin):
                self.calls.append((event.name, []))
            elif isinstance(event, CallArguments):
                self.calls[-1][1].append(event.text)
            else:
                self.write(event.text)


def _parser_of(engine: LLMEngine) -> type[ToolCallParser]:
    assert engine.chat_template is not None, "checked before"
    name = parser_of_template(engine.chat_template.with_tools.source)
    if name is None:
        raise ConfigError(
            "--tools: the tool call format cannot be detected from the chat template",
            hint="start quire serve with --tool-call-parser, and chat with --url", field="tools",
        )  # fmt: skip
    return tool_call_parser(name)
