"""POST /v1/messages and /v1/messages/count_tokens. Made by `server.app`; owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ContextLengthError, ValidationError
from quire.server.api.anthropic.protocol import COUNT_FIELDS, MESSAGES_FIELDS, MessagesRequest
from quire.server.api.anthropic.translation import asks_for_thinking, chat_prompt, chat_request
from quire.server.api.anthropic.writer import MessageWriter
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.service import JSON, ChatService, PreparedChat
from quire.server.chat.state import ServerState
from quire.server.http.request_scope import scope_of

ID_PREFIX = "msg_"
INLINE_BLOCKS = 512
NO_THINKING = "thinking has no effect: this server does not parse reasoning (set --reasoning-parser)"


class MessagesRoutes:
    """The Messages API.

    Args:
        state: of the server.
        service: runs what is translated into a chat.
    """

    def __init__(self, state: ServerState, service: ChatService) -> None:
        self._state = state
        self._service = service

    async def answer(self, request: Request) -> Response:
        """Answer a conversation."""
        body, warnings = await self._service.read(request, MESSAGES_FIELDS)
        limits = self._state.config.limits
        can_end = self._state.parsing.can_end_reasoning
        translated = await _run_in_thread(body, lambda: chat_request(body, warnings, limits, can_end_reasoning=can_end))
        try:
            chat = await self._service.prepare_chat(request, translated, ID_PREFIX, warnings, buffers_tool_calls=True)
        except ContextLengthError as error:  # in the words by which agents know that they must shorten it
            raise ValidationError(
                f"prompt is too long: {error.size} {error.unit} > {error.limit} maximum", hint="shorten it",
                field="messages",
            ) from None  # fmt: skip
        _note_thinking(body, chat, warnings)
        counts = AnswerCounts(self._state, chat.work, chat.model, reports_cache=bool(body.return_cache_info))
        writer = MessageWriter(counts, chat.plan, warnings.texts, scope_of(request).request_id)
        return await self._service.respond(request, chat.work, writer, is_stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a conversation's prompt, as its answer would count them."""
        state, tenant = self._state, scope_of(request).tenant
        body, warnings = await state.bodies.read_fields(request, COUNT_FIELDS)
        state.check_model(body.model)
        chat = await _run_in_thread(body, lambda: chat_prompt(body, warnings))
        size = state.prompts.size_of(chat)
        charge = state.admission.begin(0, state.prompts.least_tokens_of(size), tenant)
        prompt = await state.prompts.read_chat(chat, Truncation(), tenant=tenant.name, size=size, warnings=warnings)
        charge.correct(len(prompt.prompt_token_ids))
        content = {
            "input_tokens": len(prompt.prompt_token_ids),
            **({"warnings": warnings.texts} if warnings.texts else {}),
        }
        return Response(msgspec.json.encode(content), media_type=JSON)


async def _run_in_thread(body: MessagesRequest, translate: Callable[[], ChatRequest]) -> ChatRequest:
    """What `translate` makes, in a thread when there is much of it."""
    contents = [message.get("content") for message in body.messages or ()]
    num_blocks = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    return translate() if num_blocks <= INLINE_BLOCKS else await asyncio.to_thread(translate)


def _note_thinking(body: MessagesRequest, chat: PreparedChat, warnings: Warnings) -> None:
    if asks_for_thinking(body) and (chat.plan is None or not chat.plan.has_reasoning):
        warnings.add("thinking", NO_THINKING)
