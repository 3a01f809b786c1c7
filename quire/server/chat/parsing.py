"""Parsing of tool calls and reasoning in chats: which parsers are used, and the events they produce.

`Parsing` is the server's, `ParsingPlan` a request's, `ParsedAnswer` a completion's; the last owns its calls' ids.

With the formats `qwen3` and `hermes`, text that arrives in three pieces:

    plan = parsing.plan(request, warnings)         # None when neither reasoning nor calls are parsed
    plan.constrain(params, prompt_token_ids)       # tool_choice "required": a grammar of the format's calls
    answer = plan.answer(prompt_token_ids)         # one for each of the n completions
    answer.push("<think>Two", ids, is_end=False)   # reasoning: "Two"
    answer.push("</think>It", ids, is_end=False)   # content: "It"
    answer.push(' is<tool_call>{"name":"f","arguments":{}}</tool_call>', ids, is_end=True)   # " is", a call of f
    answer.finish_reason("stop")                   # "tool_calls"
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from functools import cached_property

from quire.config.server import ApiConfig
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.protocol import EngineClient
from quire.errors import ValidationError
from quire.logger import get_logger
from quire.parsers.answer import ParserChain, ReasoningCount
from quire.parsers.base import AnswerParser
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.events import CallArguments, CallBegin, Content, Event
from quire.parsers.harmony import HarmonyParser
from quire.parsers.reasoning_format import ReasoningFormat
from quire.parsers.registry import HARMONY_REASONING, parser_of_template, tool_call_parser
from quire.parsers.tools import Tools
from quire.server.chat.answer_events import AnswerEvent, AnswerReader, PlainAnswer, ToolCallDelta, ToolCallStart
from quire.server.chat.forcing import CallWriter, grammar_for
from quire.server.chat.named_parsers import AUTO, ToolMaker, named_reasoning_parser, named_tool_parser
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.response_format import structured_outputs
from quire.server.chat.protocol.tools import ToolChoice, repeated_names, tool_choice
from quire.server.chat.protocol.warnings import Warnings
from quire.tokenization.tokenizer import Tokenizer

logger = get_logger(__name__)

ID_ALPHABET = string.ascii_letters + string.digits


class Parsing:
    """What a server reads out of answers.

    Args:
        config: names the parsers.
        engine: its chat template decides the format where none is named.

    Raises:
        ConfigError: as `named_parsers.check_parsers`.
    """

    def __init__(self, config: ApiConfig, engine: EngineClient) -> None:
        self._config = config
        self._tokenizer = engine.tokenizer
        self._structured = engine.config.structured_outputs
        self._special: dict[str, int] = {}
        if self._tokenizer is not None:
            self._special = {self._tokenizer.token_text(one): one for one in self._tokenizer.special_ids}
        kind = named_reasoning_parser(config)
        tokenizer = engine.tokenizer
        self._reasoning = None if kind is None or tokenizer is None else ReasoningFormat(kind, tokenizer)
        self._is_harmony = config.reasoning_parser == HARMONY_REASONING
        self._make_tools = named_tool_parser(config)
        if config.tool_call_parser == AUTO and engine.chat_template is not None:
            name = parser_of_template(engine.chat_template.with_tools.source)
            if name is not None:
                self._make_tools = tool_call_parser(name)
                logger.info("tool call parser: %s (detected from the chat template)", name)

    @cached_property
    def can_end_reasoning(self) -> bool:
        """True when `thinking_token_budget` of a chat can be kept, with tools or without."""
        if self._reasoning is None:
            return False
        if self._make_tools is not None and self._make_tools.has_reasoning:
            return False
        return bool(self._reasoning.end_ids)

    def plan(self, request: ChatRequest, warnings: Warnings, *, buffers_tool_calls: bool = False) -> ParsingPlan | None:
        """What to read out of the answers to `request`; None = they are plain text.

        Args:
            warnings: gets what has no effect.
            buffers_tool_calls: send calls when they are complete, whatever the settings say.

        Raises:
            ValidationError, UnsupportedError: as `tool_choice` and `grammar_for`.
        """
        can_force = self._make_tools is not None
        choice = tool_choice(request, can_parse=can_force and self._config.enable_auto_tool_choice, can_force=can_force)
        make = self._make_tools if choice.tools else HarmonyParser if self._is_harmony else None
        form = None
        if choice.tools:
            assert self._make_tools is not None, "calls can be read"
            for number, first in repeated_names(request.tools or ()):
                where = f"tools[{number}].function.name"
                warnings.advise(f"{where} is that of tools[{first}], too: a call does not say which one is meant")
            form = self._form(request, choice, self._make_tools.syntax(self._special), warnings)
        reasoning = None if make is not None and make.has_reasoning else self._reasoning
        if make is None and reasoning is None:
            return None
        assert self._tokenizer is not None, "a chat has a tokenizer"
        return ParsingPlan(
            request, self._tokenizer, reasoning, make, Tools(choice.tools), frozenset(self._special),
            buffers_tool_calls=buffers_tool_calls or self._config.hold_tool_calls,
            form=form, has_one_call=choice.is_one,
            is_calls_alone=choice.is_required,
        )  # fmt: skip

    def _form(
        self, request: ChatRequest, choice: ToolChoice, syntax: CallSyntax | None, warnings: Warnings
    ) -> StructuredOutputsParams | None:
        """The form of an answer that may have these calls; None = any."""
        if request.structured_outputs is not None and choice.is_required:
            raise ValidationError(
                "structured_outputs and tool_choice both constrain the output",
                hint="leave out one of them", field="structured_outputs",
            )  # fmt: skip
        if request.structured_outputs is not None:
            return None  # the answer is no call
        writer = CallWriter(syntax, self._special, self._structured)
        form = None if choice.is_required else structured_outputs(request.response_format, None, request.form_field)
        return grammar_for(choice, form, writer, warnings)


class ParsingPlan:
    """What is read out of the answers to one request.

    Attributes:
        needs_special_tokens: control tokens must be part of the text.
        has_reasoning: responses return their reasoning.
        is_calls_alone: what else an answer has is the mark-up of its calls, one that was cut among them.
    """

    def __init__(
        self,
        request: ChatRequest,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        make_tools: ToolMaker | None,
        tools: Tools,
        special_texts: frozenset[str],
        *,
        buffers_tool_calls: bool,
        form: StructuredOutputsParams | None = None,
        has_one_call: bool = False,
        is_calls_alone: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._make_tools = make_tools
        self._tools = tools
        self._buffers_tool_calls = buffers_tool_calls
        self._form = form
        self._waits_for_end = False
        self._continued: str | None = None
        if request.continue_final_message and request.messages:
            content = request.messages[-1].get("content")
            self._continued = content if isinstance(content, str) else ""
        self.needs_special_tokens = any(
            one.needs_special_tokens or not special_texts.isdisjoint(one.marks)
            for one in (None if reasoning is None else reasoning.kind, make_tools)
            if one is not None
        )
        self.has_reasoning = reasoning is not None or (make_tools is not None and make_tools.has_reasoning)
        self.shows_reasoning = self.has_reasoning and request.include_reasoning is not False
        self.max_calls = 1 if has_one_call else None
        self.is_calls_alone = is_calls_alone
        self.id_chars = 0 if make_tools is None else make_tools.id_chars

    def constrain(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Make `params`, in place, those of answers to this prompt that have the calls they must have.

        Forms and budgets are for answers that may think: what is parsed as reasoning here is passed to the engine, too.
        """
        if self.needs_special_tokens:
            params.skip_special_tokens = False
        if self._form is not None:
            params.structured_outputs = self._form
        has_form = params.structured_outputs is not None or params.thinking_token_budget is not None
        if has_form and self._reasoning is not None:
            self._waits_for_end = True
            params.reasoning = self._reasoning.delimiters(prompt_token_ids, self._continued)

    def answer(self, prompt_token_ids: Sequence[int]) -> ParsedAnswer:
        """A new answer to this prompt."""
        count = None
        if self.has_reasoning:
            count = ReasoningCount(
                self._parser(prompt_token_ids, counts=True), self._tokenizer, prompt_token_ids,
                skip_special_tokens=not self.needs_special_tokens,
            )  # fmt: skip
        return ParsedAnswer(self, self._parser(prompt_token_ids), count)

    def _parser(self, prompt_token_ids: Sequence[int], *, counts: bool = False) -> AnswerParser:
        """Of a whole answer, or of its reasoning only."""
        reasoning = None if self._reasoning is None else self._reasoning.parser(prompt_token_ids, self._continued)
        if reasoning is not None:
            reasoning.waits_for_end = self._waits_for_end
        if self._make_tools is None or (counts and reasoning is not None):
            assert reasoning is not None, "a plan reads something"
            return reasoning
        tool_calls = self._make_tools(self._tools, buffers_tool_calls=self._buffers_tool_calls)
        return tool_calls if reasoning is None else ParserChain(reasoning, tool_calls)


class ParsedAnswer:
    """One answer as its text comes.

    Args:
        plan: of its request.
        parser: of this answer.
        count: counts its tokens of reasoning.
    """

    def __init__(self, plan: ParsingPlan, parser: AnswerParser, count: ReasoningCount | None) -> None:
        self._plan = plan
        self._parser = parser
        self._count = count
        self._num_calls = 0
        self._ids: set[str] = set()

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        return 0 if self._count is None else self._count.num_tokens

    def push(self, text: str, token_ids: Sequence[int], *, is_end: bool) -> list[AnswerEvent]:
        """As `AnswerReader.push`."""
        if self._count is not None:
            self._count.push(token_ids)
        events = self._parser.push(text)
        if is_end:
            events = events + self._parser.finish()
        return [told for event in events if (told := self._to_event(event)) is not None]

    def finish_reason(self, reason: str | None) -> str | None:
        """As `AnswerReader.finish_reason`."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _to_event(self, event: Event) -> AnswerEvent | None:
        """What the request wants to know of `event`."""
        if isinstance(event, Content):
            return None if self._plan.is_calls_alone else event
        if isinstance(event, CallBegin):
            self._num_calls += 1
            return (
                None
                if self._exceeds_limit
                else ToolCallStart(self._num_calls - 1, self._make_id(event.call_id), event.name)
            )
        if isinstance(event, CallArguments):
            return None if self._exceeds_limit else ToolCallDelta(self._num_calls - 1, event.text)
        return event if self._plan.shows_reasoning else None

    @property
    def _exceeds_limit(self) -> bool:
        """The last call is one more than the request wants."""
        return self._plan.max_calls is not None and self._num_calls > self._plan.max_calls

    def _make_id(self, given: str) -> str:
        """The id that the model gave the call, if that is the first with it; else a new one."""
        if given and given not in self._ids:
            self._ids.add(given)
            return given
        if self._plan.id_chars:
            return "".join(secrets.choice(ID_ALPHABET) for _ in range(self._plan.id_chars))
        return f"call_{secrets.token_hex(12)}"


def answer_reader(plan: ParsingPlan | None, prompt_token_ids: Sequence[int]) -> AnswerReader:
    """What reads an answer to this prompt."""
    return PlainAnswer() if plan is None else plan.answer(prompt_token_ids)
