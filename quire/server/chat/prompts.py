"""PromptReader: the prompt of a request as token ids.

Used by the routes. Templates and long texts are worked on in the threads that tenants share, so that the event loop
goes on. What a user typed never becomes a control token. Owns what it knows of the tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from quire.config.json_object import parse_object
from quire.config.server import ApiConfig
from quire.core.inputs import TokensPrompt, parse_messages, parse_prompt
from quire.engine.protocol import EngineClient
from quire.errors import ChatTemplateError, ContextLengthError, UnsupportedError, ValidationError
from quire.server.chat.protocol.chat import ChatFields, chat_messages
from quire.server.chat.protocol.effort import check_effort, effort_kwargs
from quire.server.chat.protocol.warnings import Warnings
from quire.server.http.prompt_workers import PromptWorkers
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.control_tokens import ControlTokens
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.checks import check_int_list

T = TypeVar("T")

INLINE_CHARS = 1024
MAX_INLINE_S = 0.01
INLINE_SHARE = 0.1  # of the last one in the mean, so that a pause of the interpreter's collector does not decide
PROBES = ("a", " a", "1", "\n", "é", "...")
"""Beginnings of what may follow a constant text: they differ in their first token."""
ALWAYS_CHARS = 1 << 18
BYTES_PER_CHAR = 4  # at most, in UTF-8
CONTROL_WARNING = (
    "the prompt contains names of special tokens, which are read as plain text; to use special tokens "
    "send token ids, or start the server with --allow-special-tokens"
)


@dataclass(frozen=True, slots=True)
class Truncation:
    """What of a prompt is used: its last (`side` left) or first `num_tokens` tokens; None = all, -1 = as many as leave
    room for `num_new` tokens.
    """

    num_tokens: int | None = None
    side: str = "left"
    num_new: int = 1


class PromptReader:
    """Turns prompts into token ids.

    Args:
        engine: has the tokenizer and the template.
        config: of the API.
        workers: threads.
    """

    def __init__(self, engine: EngineClient, config: ApiConfig, workers: PromptWorkers) -> None:
        self._engine = engine
        self._config = config
        self._default_kwargs = parse_object("default_chat_template_kwargs", config.default_chat_template_kwargs)
        self._control = None if engine.tokenizer is None else ControlTokens(engine.tokenizer)
        self._workers = workers
        self._inline_s = 0.0  # CPU time of short conversations, a moving mean

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.config.model.max_model_len or 1

    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValidationError: the engine runs without one.
        """
        if self._engine.tokenizer is None:
            raise ValidationError(
                "this server takes token ids only (skip_tokenizer_init)", hint="send token ids", field="prompt"
            )
        return self._engine.tokenizer

    def least_tokens(self, prompt: str | list[int]) -> int:
        """The tokens that a prompt has at least.

        Raises:
            ValidationError: no prompt of this length fits the model.
        """
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            return len(prompt) // self._longest_piece
        return len(prompt)

    def size_of(self, request: ChatFields) -> int:
        """The bytes that a conversation's prompt is made of.

        Raises:
            ValidationError: what has so many cannot become a prompt that fits; no part of it was looked at.
        """
        parts = (request.messages, request.tools, request.documents, request.chat_template_kwargs)
        size = len(msgspec.json.encode(parts))
        if size > BYTES_PER_CHAR * ALWAYS_CHARS and size > BYTES_PER_CHAR * self.max_chars:
            raise ContextLengthError(
                self.max_model_len, size, "bytes", what="messages, tools, documents and chat_template_kwargs have",
                limit=BYTES_PER_CHAR * self.max_chars, field="messages",
            )  # fmt: skip
        return size

    def least_tokens_of(self, size: int) -> int:
        """The tokens that the prompt of a conversation of `size` bytes has, at a low guess."""
        return size // (BYTES_PER_CHAR * self._longest_piece)

    async def read(
        self,
        prompt: str | list[int],
        cut: Truncation,
        *,
        tenant: str,
        warnings: Warnings,
        add_special_tokens: bool = True,
    ) -> TokensPrompt:
        """A text or ids as a prompt.

        Args:
            cut: what of it is used.
            tenant: whose turn of the threads it takes.
            add_special_tokens: write what the vocabulary puts around a text.
            warnings: gets advice when names of control tokens were read as plain text.

        Raises:
            ValidationError: it is empty or malformed.
        """
        if isinstance(prompt, list):
            if cut.num_tokens is None:  # before each id is looked at
                self.check_fits(len(prompt))
            self._check_length(prompt, "prompt", "tokens")
            return cut_prompt(_parsed_ids(prompt), cut, self.max_model_len)
        tokenizer = self.tokenizer()
        self._check_length(prompt, "prompt")
        allow = self._config.allow_special_tokens
        if not allow and self._control and self._control.is_named_in(prompt):
            warnings.advise(CONTROL_WARNING)
        ids = await self._run(
            tenant, len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens, allow_special=allow)
        )
        return cut_prompt(TokensPrompt(tuple(ids), prompt), cut, self.max_model_len)

    def check_fits(self, num_tokens: int, field: str = "prompt") -> None:
        """Refuse a prompt that leaves no room for a token of its answer."""
        if num_tokens >= self.max_model_len:
            what = "the prompt has" if field == "prompt" else f"the {field} have"
            raise ContextLengthError(self.max_model_len, num_tokens, what=what, field=field)

    async def read_chat(
        self,
        request: ChatFields,
        cut: Truncation,
        *,
        tenant: str,
        size: int,
        warnings: Warnings,
        add_special_tokens: bool = False,
    ) -> TokensPrompt:
        """A conversation as a prompt.

        Args:
            cut: what of it is used.
            tenant: whose turn of the threads it takes.
            size: as `size_of` says.
            warnings: gets each key of a message that is not used.

        Raises:
            ValidationError, ChatTemplateError, UnsupportedError: the conversation or the template does not allow it.
        """
        messages = chat_messages(request, warnings)
        template = self._template(request)
        if request.reasoning_effort is not None:
            request = self._with_effort(request, template, warnings)
        is_own = template is self._engine.chat_template and not request.chat_template_kwargs
        if is_own and size <= INLINE_CHARS and self._inline_s < MAX_INLINE_S:
            template, before_s = self._inline_template, time.thread_time()
            try:
                return self._render(template, request, messages, cut, add_special_tokens)
            finally:
                self._inline_s += INLINE_SHARE * (time.thread_time() - before_s - self._inline_s)
        return await self._workers.run(
            tenant, size, lambda: self._render(template, request, messages, cut, add_special_tokens)
        )

    @cached_property
    def _inline_template(self) -> ChatTemplate:
        """The model's template for short conversations, which the event loop renders itself: a thread costs more.

        A template that takes longer than `MAX_INLINE_S` is rendered in threads from then on.
        """
        assert self._engine.chat_template is not None, "asked only where there is one"
        return self._engine.chat_template.copy()

    def constant_prefix(self, system: str | None = None, text: str | None = None) -> list[int]:
        """The ids that a conversation with this system prompt, or a completion of this text, begins with, whatever
        follows.

        Raises:
            ValidationError, ChatTemplateError, UnsupportedError: there is no such prompt.
        """
        if text is not None:
            encode, allow = self.tokenizer().encode, self._config.allow_special_tokens
            prompts = [encode(text + probe, True, allow_special=allow) for probe in PROBES]
        else:
            turns = [{"role": "system", "content": system}]
            chats = [ChatFields(messages=[*turns, {"role": "user", "content": probe}]) for probe in PROBES]
            prompts = [
                list(self._render(self._template(chat), chat, messages, Truncation(), False).prompt_token_ids)
                for chat, messages in ((chat, chat_messages(chat, Warnings())) for chat in chats)
            ]
        return _common_prefix(prompts)

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids, control tokens shown."""
        return self.tokenizer().decode(token_ids, skip_special_tokens=False)

    @cached_property
    def max_chars(self) -> int:
        """Characters that a prompt can have at most; a quarter of a million can always be counted."""
        return max(ALWAYS_CHARS, self.max_model_len * self._longest_piece)

    @cached_property
    def _longest_piece(self) -> int:
        """Characters that a token can stand for at most."""
        table = None if self._engine.tokenizer is None else self._engine.tokenizer.table
        if table is None:
            return 16
        return max(1, max((len(table.piece(one)) for one in range(self.tokenizer().vocab_size)), default=1))

    async def decode_long(self, token_ids: list[int], tenant: str) -> str:
        """As `decode`, of any number of ids that a prompt may have as characters."""
        if len(token_ids) > ALWAYS_CHARS and len(token_ids) > self.max_chars:
            raise ValidationError(
                f"tokens has {len(token_ids)} entries, at most {self.max_chars} are allowed", field="tokens"
            )
        most = self.tokenizer().vocab_size - 1
        return await self._run(
            tenant, len(token_ids), lambda: self.decode(check_int_list("tokens", token_ids, 0, most))
        )

    async def token_strs(self, token_ids: list[int], tenant: str) -> list[str]:
        """The vocabulary's entries of ids."""
        tokenizer = self.tokenizer()
        return await self._run(tenant, len(token_ids), lambda: tokenizer.convert_ids_to_tokens(token_ids))

    def _check_length(self, prompt: str | list[int], field: str, unit: str = "characters") -> None:
        """Refuse what cannot fit the model before it is tokenized, which takes a second for each megabyte."""
        if len(prompt) > ALWAYS_CHARS and len(prompt) > self.max_chars:
            raise ContextLengthError(self.max_model_len, len(prompt), unit, limit=self.max_chars, field=field)

    def _render(
        self,
        template: ChatTemplate,
        request: ChatFields,
        messages: list[dict[str, Any]],
        cut: Truncation,
        add_special_tokens: bool,
    ) -> TokensPrompt:
        assert self._control is not None, "a template needs a tokenizer"
        values: Mapping[str, Any] = {
            "messages": parse_messages(messages),
            "tools": None if self._hides_tools(request) else request.tools,
            "documents": request.documents,
            "kwargs": {**self._default_kwargs, **(request.chat_template_kwargs or {})},
        }
        marked, mark = self._control.mark(values)
        continues = bool(request.continue_final_message)
        rendered = template.render(
            marked["messages"],
            tools=marked["tools"],
            documents=marked["documents"],
            add_generation_prompt=not continues
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=continues,
            content_format=self._config.chat_template_content_format,
            template_kwargs=marked["kwargs"],
        )
        self._check_length(rendered, "messages")
        text, ids = self._control.encode(rendered, mark)
        if add_special_tokens:
            around = self.tokenizer().encode("", add_special_tokens=True)
            ids = [*around, *ids]
        if not ids:
            raise ValidationError("the chat template rendered the messages to an empty prompt", field="messages")
        return cut_prompt(TokensPrompt(tuple(ids), text, template_id=template.id), cut, self.max_model_len)

    def _hides_tools(self, request: ChatFields) -> bool:
        return self._config.exclude_tools_when_tool_choice_none and request.tool_choice == "none"

    def _with_effort(self, request: ChatFields, template: ChatTemplate, warnings: Warnings) -> ChatFields:
        """`request` with its `reasoning_effort` as variables of the template."""
        name, effort = "reasoning_effort", request.reasoning_effort
        assert effort is not None, "it is given"
        check_effort(name, effort, name)
        own = request.chat_template_kwargs
        kwargs = effort_kwargs(name, effort, own, template.source, warnings)
        return msgspec.structs.replace(request, chat_template_kwargs=kwargs)

    def _template(self, request: ChatFields) -> ChatTemplate:
        if request.chat_template is not None:
            if not self._config.trust_request_chat_template:
                raise UnsupportedError(
                    "chat_template: this server does not accept templates in requests",
                    hint="leave it out, or start the server with --trust-request-chat-template",
                    field="chat_template",
                )
            return ChatTemplate(request.chat_template, self.tokenizer().special_tokens)
        if self._engine.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template",
                hint="use /v1/completions, or start the server with --chat-template",
                field="messages",
            )
        template = self._engine.chat_template
        return template.with_tools if request.tools and not self._hides_tools(request) else template

    async def _run(self, tenant: str, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= INLINE_CHARS:
            return work()
        return await self._workers.run(tenant, num_chars, work)


def _parsed_ids(prompt: list[int]) -> Any:
    """A prompt of ids, whose errors name the field that it came in."""
    try:
        return parse_prompt(prompt)
    except ValidationError as error:
        inner, outer = "prompt_token_ids", "prompt"
        message, hint, field = (
            text and text.replace(inner, outer) for text in (error.message, error.hint, error.field)
        )
        raise ValidationError(message or "", hint=hint, field=field) from None


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    length = 0
    for ids in zip(*prompts, strict=False):
        if len(set(ids)) > 1:
            break
        length += 1
    return prompts[0][:length]


def cut_prompt(prompt: Any, cut: Truncation, max_model_len: int) -> TokensPrompt:
    """`prompt` with what `cut` leaves of it; a prompt that was cut has no text."""
    assert isinstance(prompt, TokensPrompt)
    if cut.num_tokens is None:
        return prompt
    limit = cut.num_tokens
    if limit == -1:
        limit = max_model_len - (cut.num_new if cut.num_new < max_model_len else 1)
    ids = prompt.prompt_token_ids
    if len(ids) <= limit:
        return prompt
    if limit == 0:
        raise ValidationError("truncate_prompt_tokens=0 leaves an empty prompt", field="truncate_prompt_tokens")
    kept = ids[:limit] if cut.side == "right" else ids[len(ids) - limit :]
    return TokensPrompt(kept, template_id=prompt.template_id)
