"""Routes of /v1/responses that need a model: create a response, count its tokens.

Made with the state of a model; own nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import ValidationError
from quire.server.api.responses.background import Claim, LiveResponse
from quire.server.api.responses.envelope import ResponseEnvelope
from quire.server.api.responses.history import Turn, read_turn
from quire.server.api.responses.kept import KeptResponses, store_failures
from quire.server.api.responses.kept_routes import followed, json_response
from quire.server.api.responses.protocol import (
    RESPONSES_FIELDS,
    ResponsesRequest,
    check_request,
    wants_logprobs,
)
from quire.server.api.responses.store import Key
from quire.server.api.responses.tools import origins_of
from quire.server.api.responses.translation import chat_request
from quire.server.api.responses.writer import ResponseWriter
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.generation import REQUEST_ID, check_truncation
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.running import Run
from quire.server.chat.service import ChatService, PreparedChat
from quire.server.chat.state import ServerState
from quire.server.http.request_scope import scope_of
from quire.utils.checks import shown


class ResponsesRoutes:
    """The routes of /v1/responses.

    Args:
        state: of the model.
        service: runs the chats that responses are.
        kept: the responses of the server.
    """

    def __init__(self, state: ServerState, service: ChatService, kept: KeptResponses) -> None:
        self._state = state
        self._service = service
        self._kept = kept

    async def create(self, request: Request) -> Response:
        """Answer a turn of a conversation."""
        body, warnings = await self._service.read(request, RESPONSES_FIELDS)
        check_request(body, warnings)
        is_stored = self._check_storing(body, warnings)
        key = scope_of(request).tenant.name, _own_id(body) or f"resp_{secrets.token_hex(24)}"
        background = self._kept.background
        if background.is_taken(key):
            raise _taken(body)
        claim = background.claim(key)
        try:
            if body.request_id is not None and not await background.share(key):
                raise _taken(body)
            if not is_stored:
                claim.end()
                return await self._answer(request, body, key, warnings, claim=None)
            if body.request_id is not None and await self._kept.stored(key) is not None:
                raise _taken(body)
            return await self._answer(request, body, key, warnings, claim=claim)
        finally:
            claim.end()

    async def _answer(
        self,
        request: Request,
        body: ResponsesRequest,
        key: Key,
        warnings: Warnings,
        claim: Claim | None,
    ) -> Response:
        """The answer to a request; what is kept is claimed."""
        tenant, response_id = key
        with store_failures():
            turn = await read_turn(body, self._kept.store, self._kept.background, tenant, self._max_turns, warnings)
        chat = chat_request(body, turn.conversation, self._template(body), warnings)
        chat.stream = bool(body.stream or body.background)
        prepared = await self._service.prepare_chat(request, chat, "resp_", warnings)
        prepared = replace(prepared, work=replace(prepared.work, public_id=response_id))
        writer = self._writer(body, prepared, is_stored=claim is not None, warnings=warnings)
        if body.background:
            return await self._start(request, body, prepared, writer, turn)
        answer = await self._service.respond(request, prepared.work, writer, is_stream=bool(body.stream))
        if claim is None:
            return answer
        if body.stream:
            return _SavedStream(answer, lambda: self._kept.save(tenant, turn, writer.response), claim.hand_on())
        await self._kept.save(tenant, turn, writer.response)
        return answer

    async def input_tokens(self, request: Request) -> Response:
        """The tokens of a turn's prompt, as its answer would count them."""
        body, warnings = await self._state.bodies.read_fields(request, RESPONSES_FIELDS)
        self._state.check_model(body.model)
        check_request(body, warnings)
        tenant, prompts = scope_of(request).tenant, self._state.prompts
        with store_failures():
            turn = await read_turn(
                body, self._kept.store, self._kept.background, tenant.name, self._max_turns, warnings
            )
        chat = chat_request(body, turn.conversation, self._template(body), warnings)
        check_truncation(chat)
        size = prompts.size_of(chat)
        charge = self._state.admission.begin(0, prompts.least_tokens_of(size), tenant)
        cut = Truncation(chat.truncate_prompt_tokens, chat.truncation_side or "left", body.max_output_tokens or 1)
        prompt = await prompts.read_chat(chat, cut, tenant=tenant.name, size=size, warnings=warnings)
        charge.correct(len(prompt.prompt_token_ids))
        content = {"object": "response.input_tokens", "input_tokens": len(prompt.prompt_token_ids)}
        return json_response({**content, "warnings": warnings.texts} if warnings.texts else content)

    @property
    def _max_turns(self) -> int:
        """Each turn has a token at least."""
        return self._state.prompts.max_model_len

    def _template(self, body: ResponsesRequest) -> str | None:
        """Source of the template that will be used."""
        template = self._state.engine.chat_template
        return body.chat_template or (None if template is None else template.source)

    def _check_storing(self, body: ResponsesRequest, warnings: Warnings) -> bool:
        """Whether the response will be kept.

        Raises:
            ValidationError: it has to be, and cannot.
        """
        is_stored = self._kept.store is not None and body.store is not False
        if body.background and not is_stored:
            why = "store=false stores none" if self._kept.store is not None else "this server does not store responses"
            raise ValidationError(
                f"background needs a stored response; {why}", hint="leave out background", field="background"
            )
        if body.store and not is_stored:
            warnings.add("store", "store has no effect: this server does not store responses")
        return is_stored

    def _writer(
        self, body: ResponsesRequest, chat: PreparedChat, *, is_stored: bool, warnings: Warnings
    ) -> ResponseWriter:
        form = ResponseEnvelope(
            body, chat.work.params, chat.work.public_id, model=chat.model, is_stored=is_stored,
            warnings=warnings.texts,
        )  # fmt: skip
        num_logprobs = (body.top_logprobs or 0) if wants_logprobs(body) else None
        counts = AnswerCounts(self._state, chat.work, chat.model, reports_cache=bool(body.return_cache_info))
        return ResponseWriter(
            form, counts, chat.plan, self._state.engine.tokenizer, num_logprobs, origins_of(body.tools)
        )

    async def _start(
        self, request: Request, body: ResponsesRequest, chat: PreparedChat, writer: ResponseWriter, turn: Turn
    ) -> Response:
        """Have a response made in the background."""
        known = scope_of(request)
        tenant = known.tenant.name
        known.answer = writer.counts
        run = Run(self._state, chat.work)
        try:
            await run.start()
            live = LiveResponse(
                (tenant, chat.work.public_id), run, writer, lambda response: self._kept.put(tenant, turn, response),
                tells_events=bool(body.stream),
            )  # fmt: skip
            with store_failures():
                await self._kept.background.start(live)
        except BaseException:
            run.close()
            raise
        return json_response(live.response) if live.log is None else followed(live.log, -1, self._state.config)


class _SavedStream(Response):
    """A stream whose last event is sent when the response is kept: who has read it can go on with the next turn."""

    def __init__(self, stream: Response, save: Callable[[], Awaitable[None]], claim: Claim) -> None:
        super().__init__(media_type="text/event-stream")
        self._stream = stream
        self._save = save
        self._claim = claim

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def send_when_kept(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await self._save()
            await send(message)

        try:
            await self._stream(scope, receive, send_when_kept)
        finally:
            self._claim.end()


def _own_id(body: ResponsesRequest) -> str | None:
    """The id that the client wants; None = any."""
    own = body.request_id
    if own is None:
        return None
    if not REQUEST_ID.fullmatch(own):
        raise ValidationError(
            f"request_id={shown(own)}: 1 to 128 letters, digits, _ - . : + are allowed", field="request_id"
        )
    return f"resp_{own}"


def _taken(body: ResponsesRequest) -> ValidationError:
    return ValidationError(
        f"request_id={shown(body.request_id)} is the id of an existing response",
        hint="use another id, or leave it out", field="request_id",
    )  # fmt: skip
