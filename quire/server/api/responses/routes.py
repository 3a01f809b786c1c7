"""Routes of /v1/responses: create, read, delete, cancel. Made by `server.app.make_app`; owns the store and what runs in
the background.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from quire.errors import ValidationError
from quire.logger import get_logger
from quire.server.api.responses.background import Background, Claim, LiveResponse
from quire.server.api.responses.envelope import CUT_OFF, ENDED, FAILED, NOT_KEPT, ResponseEnvelope, with_status
from quire.server.api.responses.event_log import EventLog
from quire.server.api.responses.history import Turn, items_page, read_turn
from quire.server.api.responses.keeping import open_store
from quire.server.api.responses.protocol import (
    RESPONSES_FIELDS,
    ResponsesRequest,
    check_request,
    wants_logprobs,
)
from quire.server.api.responses.store import Key, ShelfError, StoredResponse
from quire.server.api.responses.tools import origins_of
from quire.server.api.responses.translation import chat_request
from quire.server.api.responses.writer import ResponseWriter
from quire.server.chat.counts import AnswerCounts
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.generation import REQUEST_ID
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.running import Run
from quire.server.chat.service import JSON, ChatService, PreparedChat
from quire.server.chat.sse import HEADERS
from quire.server.chat.state import ServerState
from quire.server.http.errors import BAD_REQUEST, NOT_FOUND, STORE_FAILED, ApiError
from quire.server.http.request_scope import scope_of
from quire.utils.checks import shown

logger = get_logger(__name__)

STORE_MESSAGE = "the response store cannot be read or written; see the server's log"
RETRY_AFTER_S = 5.0
STREAM_HEADERS = {name.decode(): value.decode() for name, value in HEADERS}


class ResponsesRoutes:
    """The routes of /v1/responses.

    Args:
        state: of the server.
        service: runs the chats that responses are.

    Raises:
        ConfigError: the file of the store cannot be used.
    """

    def __init__(self, state: ServerState, service: ChatService) -> None:
        self._state = state
        self._service = service
        self._store = open_store(state.config.responses)
        self._background = Background()

    async def close(self) -> None:
        """End what runs in the background, and the store."""
        await self._background.close()
        if self._store is not None:
            await self._store.close()

    async def create(self, request: Request) -> Response:
        """Answer a turn of a conversation."""
        body, warnings = await self._service.read(request, RESPONSES_FIELDS)
        check_request(body, warnings)
        is_stored = self._check_storing(body, warnings)
        key = scope_of(request).tenant.name, _own_id(body) or f"resp_{secrets.token_hex(24)}"
        if self._background.is_taken(key):
            raise _taken(body)
        if not is_stored:
            return await self._answer(request, body, key, warnings, claim=None)
        claim = self._background.claim(key)
        try:
            if body.request_id is not None and await self._stored(key) is not None:
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
        with _store_failures():
            turn = await read_turn(body, self._store, self._background, tenant, self._max_turns, warnings)
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
            return _SavedStream(answer, lambda: self._save(tenant, turn, writer.response), claim.hand_on())
        await self._save(tenant, turn, writer.response)
        return answer

    async def input_tokens(self, request: Request) -> Response:
        """The tokens of a turn's prompt, as its answer would count them."""
        body, warnings = await self._state.bodies.read_fields(request, RESPONSES_FIELDS)
        self._state.check_model(body.model)
        tenant, prompts = scope_of(request).tenant, self._state.prompts
        with _store_failures():
            turn = await read_turn(body, self._store, self._background, tenant.name, self._max_turns, warnings)
        chat = chat_request(body, turn.conversation, self._template(body), warnings)
        size = prompts.size_of(chat)
        charge = self._state.admission.begin(0, prompts.least_tokens_of(size), tenant)
        prompt = await prompts.read_chat(chat, Truncation(), tenant=tenant.name, size=size, warnings=warnings)
        charge.correct(len(prompt.prompt_token_ids))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.prompt_token_ids)})

    async def retrieve(self, request: Request) -> Response:
        """A response that was kept, or that runs; with stream=true the events of one that runs or ran a while ago."""
        tenant, response_id = _path_key(request)
        query = request.query_params
        if query.get("stream", "false").lower() in ("true", "1"):
            return await self._resume_stream(tenant, response_id, query.get("starting_after", "-1"))
        if "starting_after" in query:
            raise ValidationError("starting_after needs stream=true", hint="leave it out", field="starting_after")
        return _json((await self._find(tenant, response_id)).response)

    async def delete(self, request: Request) -> Response:
        """Forget a response; one that runs is cancelled."""
        key = tenant, response_id = _path_key(request)
        await self._background.delete(key)
        with _store_failures():
            if self._store is None or not await self._store.delete(tenant, response_id):
                raise _unknown(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is made in the background; one that has ended stays as it is."""
        key = tenant, response_id = _path_key(request)
        live = self._background.get(key)
        if live is not None:
            return _json(await self._background.cancel(live))
        response = (await self._find(tenant, response_id)).response
        if not response.get("background"):
            raise ApiError(
                BAD_REQUEST, "this is not a background response; close its connection to cancel it",
                param="response_id",
            )  # fmt: skip
        return _json(response)

    async def input_items(self, request: Request) -> Response:
        """The items of the request that a response answered."""
        stored = await self._find(*_path_key(request))
        query = request.query_params
        return _json(items_page(stored.input, query.get("order"), query.get("limit"), query.get("after")))

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
        is_stored = self._store is not None and body.store is not False
        if body.background and not is_stored:
            why = "store=false stores none" if self._store is not None else "this server does not store responses"
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
                (tenant, chat.work.public_id), run, writer, lambda response: self._put(tenant, turn, response),
                tells_events=bool(body.stream),
            )  # fmt: skip
            with _store_failures():
                await self._background.start(live)
        except BaseException:
            run.close()
            raise
        return _json(live.response) if live.log is None else self._followed(live.log, -1)

    async def _resume_stream(self, tenant: str, response_id: str, starting_after: str) -> Response:
        """The events of a response after one that the client has."""
        if not starting_after.removeprefix("-").isdecimal():
            raise ValidationError(
                f"starting_after={shown(starting_after)} is not a valid integer", field="starting_after"
            )
        log = self._background.log_of((tenant, response_id))
        if log is not None:
            return self._followed(log, max(-1, int(starting_after[:20])))
        await self._find(tenant, response_id)
        raise ApiError(
            BAD_REQUEST,
            "the events of this response are not stored: only responses with background=true and "
                "stream=true keep theirs for a while; retry without stream", param="stream",
        )  # fmt: skip

    def _followed(self, log: EventLog, after: int) -> Response:
        events = log.events(after, self._state.config.api.sse_keep_alive_interval)
        return StreamingResponse(events, headers=STREAM_HEADERS)

    async def _find(self, tenant: str, response_id: str) -> StoredResponse:
        """A response of this tenant.

        Raises:
            ApiError: there is no such.
        """
        key = tenant, response_id
        stored = await self._stored(key)
        if stored is None:
            raise _unknown(response_id)
        live = self._background.get(key)
        if live is not None:
            stored.response = live.response
        elif stored.response.get("status") not in ENDED and not self._background.is_taken(key):
            why = CUT_OFF if self._background.could_be_kept(key) else NOT_KEPT  # or the process that made it is gone
            stored.response = with_status(stored.response, FAILED, why)
        return stored

    async def _stored(self, key: Key) -> StoredResponse | None:
        """What the store has.

        Raises:
            ApiError: it cannot be read.
        """
        with _store_failures():
            return None if self._store is None else await self._store.get(*key)

    async def _save(self, tenant: str, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response; if that fails the client has its answer all the same, and the log says why."""
        try:
            await self._put(tenant, turn, response)
        except ShelfError as error:
            logger.error("response %s could not be stored: %s", response["id"], error)

    async def _put(self, tenant: str, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response; raises `ShelfError`."""
        assert self._store is not None, "it is known to be kept"
        await self._store.put(tenant, StoredResponse(response=response, input=turn.items))


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


@contextmanager
def _store_failures() -> Iterator[None]:
    """Failures of the store are returned to the client, and their reasons logged."""
    try:
        yield
    except ShelfError as error:
        logger.error("the response store: %s", error)
        raise ApiError(STORE_FAILED, STORE_MESSAGE, retry_after_s=RETRY_AFTER_S) from None


def _path_key(request: Request) -> tuple[str, str]:
    """(tenant, id) that a request is about."""
    return scope_of(request).tenant.name, request.path_params["response_id"]


def _unknown(response_id: str) -> ApiError:
    return ApiError(NOT_FOUND, f"there is no response {shown(response_id)}", param="response_id")


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
