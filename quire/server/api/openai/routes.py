"""OpenAI's routes that generate text. Made by `server.app.make_app`; own nothing."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from quire.core.inputs import TokensPrompt
from quire.server.api.openai.chat import ChatWriter
from quire.server.api.openai.completion import CompletionWriter
from quire.server.api.openai.protocol.completion import (
    COMPLETION_FIELDS,
    CompletionRequest,
    completion_params,
    completion_prompts,
)
from quire.server.api.openai.protocol.tokenize import both_given
from quire.server.chat.answer import AnswerEnvelope
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.chat import CHAT_FIELDS, ChatRequest
from quire.server.chat.protocol.generation import warn_beside_beams
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.reading import release
from quire.server.chat.service import ChatService, cut_of
from quire.server.chat.state import ServerState
from quire.server.http.request_scope import scope_of
from quire.server.http.tenants import Charge

ABSENT = (msgspec.UNSET, msgspec.Raw(b"null"))


class GenerationRoutes:
    """Completions and chat completions.

    Args:
        state: of the server.
        service: runs what is asked for.
    """

    def __init__(self, state: ServerState, service: ChatService) -> None:
        self._state = state
        self._service = service

    async def completion(self, request: Request) -> Response:
        """Complete one prompt or many."""
        body, warnings = await self._service.read(request, COMPLETION_FIELDS)
        model = self._state.check_model(body.model)
        limits, reader = self._state.config.limits, self._state.prompts
        given = completion_prompts(body, limits)
        params = completion_params(body, self._state.engine.defaults.sampling, limits, len(given))
        warn_beside_beams(body, warnings)
        self._service.limit(request, params, body.max_tokens)
        charge = self._service.charge(request, body, [reader.least_tokens(one) for one in given], params.n)
        prompts = await self._read_prompts(request, body, given, cut_of(body, params), charge, warnings)
        self._service.note_cut(
            warnings, "max_tokens", body.max_tokens, max(len(one.prompt_token_ids) for one in prompts)
        )
        work = self._service.work(request, body, "cmpl-", prompts, params, charge)
        form = AnswerEnvelope(self._state, body, work, model=model, warnings=warnings.texts, kind="text_completion")
        echoed = None
        if body.echo:
            has_text = self._state.engine.tokenizer is not None
            echoed = [
                one.prompt if one.prompt is not None else reader.decode(list(one.prompt_token_ids)) if has_text else ""
                for one in prompts
            ]
        writer = CompletionWriter(form, body, echoed)
        return await self._service.respond(request, work, writer, is_stream=bool(body.stream))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, warnings = await self._service.read(request, CHAT_FIELDS)
        echoed = _echoed_message(body)
        if body.echo and not echoed:
            warnings.add("echo", "echo has no effect: the last message is not text of the assistant")
        chat = await self._service.prepare_chat(request, body, "chatcmpl-", warnings)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        form = AnswerEnvelope(self._state, body, chat.work, model=chat.model, warnings=warnings.texts, kind=kind)
        writer = ChatWriter(form, body, self._state.config.api.response_role, echoed, chat.plan)
        return await self._service.respond(request, chat.work, writer, is_stream=bool(body.stream))

    async def invocation(self, request: Request) -> Response:
        """Answer a conversation or complete a prompt, whichever the body has (SageMaker's path)."""
        body = await self._state.bodies.read_bytes(request)
        release(request)
        try:
            has = msgspec.json.decode(body, type=_Has)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            has = _Has()  # what is wrong with it is found below
        if has.prompt not in ABSENT and has.messages not in ABSENT:
            raise both_given()
        is_completion = has.prompt not in ABSENT
        again = Request(request.scope, replayed(body, request.receive))
        return await (self.completion(again) if is_completion else self.chat(again))

    async def _read_prompts(
        self,
        request: Request,
        body: CompletionRequest,
        given: list[str | list[int]],
        cut: Truncation,
        charge: Charge,
        warnings: Warnings,
    ) -> list[TokensPrompt]:
        """The prompts of a completion; the first that cannot fit ends it."""
        reader, prompts, num_tokens = self._state.prompts, [], 0
        for one in given:
            prompt = await reader.read(
                one, cut, tenant=scope_of(request).tenant.name, add_special_tokens=body.add_special_tokens is not False,
                warnings=warnings,
            )  # fmt: skip
            num_tokens += len(prompt.prompt_token_ids)
            charge.correct(max(charge.num_tokens, num_tokens))
            reader.check_fits(len(prompt.prompt_token_ids))
            prompts.append(prompt)
        return prompts


class _Has(msgspec.Struct):
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read, for a route that reads it again."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return unread.pop() if unread else await receive()

    return next_message


def _echoed_message(body: ChatRequest) -> str:
    """The text that the answer begins with: that of the last message, if it is to be echoed."""
    last = (body.messages or [{}])[-1]
    content = last.get("content")
    return content if body.echo and last.get("role") == "assistant" and isinstance(content, str) else ""
