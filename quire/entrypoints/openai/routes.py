"""Routes: what each path of the API does. Made by `server.app.make_app`; owns nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from quire.core.cache_salt import tenant_salt
from quire.core.inputs import TokensPrompt, parse_prompt
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.entrypoints.openai.access import is_probe
from quire.entrypoints.openai.answer import AnswerForm
from quire.entrypoints.openai.chat import ChatWriter
from quire.entrypoints.openai.completion import CompletionWriter
from quire.entrypoints.openai.error_forms import ID_KEY, UNUSABLE_ID, error_response
from quire.entrypoints.openai.errors import ApiError, ClientGoneError, api_error_of
from quire.entrypoints.openai.parsing import ParsingPlan
from quire.entrypoints.openai.prompt_workers import LONG_BYTES
from quire.entrypoints.openai.prompts import Cut
from quire.entrypoints.openai.protocol.chat import CHAT_FIELDS, ChatRequest, chat_params
from quire.entrypoints.openai.protocol.completion import (
    COMPLETION_FIELDS,
    CompletionRequest,
    completion_params,
    completion_prompts,
)
from quire.entrypoints.openai.protocol.generation import GenerationFields
from quire.entrypoints.openai.protocol.notes import Notes
from quire.entrypoints.openai.protocol.reading import RequestFields
from quire.entrypoints.openai.reading import release
from quire.entrypoints.openai.running import Run, Work, unless_gone
from quire.entrypoints.openai.sse import EventStream, EventWriter
from quire.entrypoints.openai.state import ServerState, public_id
from quire.entrypoints.openai.tenants import Charge, Tenant
from quire.errors import EngineDeadError, ValidationError
from quire.logger import get_logger
from quire.utils.checks import check_int, shown

logger = get_logger(__name__)

Route = Callable[[Request], Awaitable[Response]]
JSON = "application/json"
NO_CLIENT = 499
PRIORITY_HEADER = "X-Vllm-Priority"
BAD_ID = "X-Request-Id is not used: it has other characters than letters, digits, _ - . : +, or more than 128"
INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


def answered(route: Route, state: ServerState) -> Route:
    """`route`, with every exception answered from the catalogue, and refusals counted."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except ClientGoneError:
            return Response(status_code=NO_CLIENT)
        except Exception as error:  # the catalogue decides what the client is told, and logs the rest
            return refused(request, api_error_of(error), state)
        finally:
            release(request)

    answer.__name__, answer.__doc__ = route.__name__, route.__doc__
    return answer


def refused(request: Request, error: ApiError, state: ServerState) -> Response:
    """The answer to a request that is refused, which is counted; a probe that learns how the server is, is not."""
    if error.reason and not is_probe(request.scope):
        tenant = request.state.tenant
        state.metrics.record_refusal(error.reason, "" if tenant is state.tenants.anonymous else tenant.name)
    return error_response(request.scope, error)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation that can be run.

    Attributes:
        plan: what is read out of the answers; None = they are plain text.
        model: name to report.
    """

    work: Work
    plan: ParsingPlan | None
    model: str


class GenerationRoutes:
    """The routes that generate text."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def completion(self, request: Request) -> Response:
        """Complete one prompt or many."""
        body, warnings = await self.read(request, COMPLETION_FIELDS)
        model = self._state.check_model(body.model)
        limits, reader = self._state.config.limits, self._state.prompts
        given = completion_prompts(body, limits)
        params = completion_params(body, self._state.engine.defaults.sampling, limits, len(given))
        self._limit(request, params, body.max_tokens)
        charge = self._charge(request, body, [reader.least_tokens(one) for one in given], params.n)
        prompts = await self._read_prompts(request, body, given, _cut(body, params), charge, warnings)
        self._note_cut(warnings, "max_tokens", body.max_tokens, max(len(one.prompt_token_ids) for one in prompts))
        work = self._work(request, body, "cmpl-", prompts, params, charge)
        form = AnswerForm(
            self._state, body, work, model=model, warnings=list(dict.fromkeys(warnings)), kind="text_completion"
        )
        echoed = None
        if body.echo:
            has_text = self._state.engine.tokenizer is not None
            echoed = [
                one.prompt if one.prompt is not None else reader.decode(list(one.prompt_token_ids)) if has_text else ""
                for one in prompts
            ]
        writer = CompletionWriter(form, body, echoed)
        return await self.respond(request, work, writer, is_stream=bool(body.stream))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, warnings = await self.read(request, CHAT_FIELDS)
        chat = await self.prepare_chat(request, body, "chatcmpl-", warnings)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        form = AnswerForm(self._state, body, chat.work, model=chat.model, warnings=warnings, kind=kind)
        writer = ChatWriter(form, body, self._state.config.api.response_role, _echoed_message(body), chat.plan)
        return await self.respond(request, chat.work, writer, is_stream=bool(body.stream))

    async def invocation(self, request: Request) -> Response:
        """Answer a conversation or complete a prompt, whichever the body has (SageMaker's path)."""
        body = await self._state.bodies.read_bytes(request)
        release(request)
        try:
            is_completion = msgspec.json.decode(body, type=_HasPrompt).prompt is not msgspec.UNSET
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            is_completion = False  # what is wrong with it is found below
        again = Request(request.scope, _replayed(body, request.receive))
        return await (self.completion(again) if is_completion else self.chat(again))

    async def read(self, request: Request, fields: RequestFields[Any]) -> tuple[Any, list[str]]:
        """The typed body of a request that is metered, and warnings about fields that were not used.

        Raises:
            ApiError, ClientGoneError, ValidationError, UnsupportedError: as `BodyReader.read_fields`, or no new work is
                taken.
        """
        state = self._state
        request.state.metered = request.state.tenant
        state.refuse_new_work()
        body, warnings = await state.bodies.read_fields(request, fields)
        if request.scope["state"].get(UNUSABLE_ID):
            self.notes(warnings).add("X-Request-Id", BAD_ID, "send 1 to 128 letters, digits, _ - . : +")
        return body, warnings

    def notes(self, warnings: list[str]) -> Notes:
        """Where what is not used as it came is said: `warnings`, or an error where requests are strict."""
        return Notes(warnings, is_strict=self._state.config.api.strict_requests)

    def _note_cut(self, warnings: list[str], field: str, asked: int | None, num_prompt_tokens: int) -> None:
        """Name what of an answer cannot come, as prompt and answer have the model's length together."""
        room = self._state.prompts.max_model_len - num_prompt_tokens
        if asked is not None and asked > room:
            text = f"{asked} tokens were asked for, the model's length leaves {room} after this prompt"
            self.notes(warnings).add(field, text, f"ask for at most {room}, or shorten the prompt")

    async def prepare_chat(
        self, request: Request, body: ChatRequest, prefix: str, warnings: list[str], *, holds_calls: bool = False
    ) -> PreparedChat:
        """A conversation as work for the engine; other APIs translate theirs into a `ChatRequest` first.

        Args:
            prefix: of the answer's id.
            warnings: gets a line for each field that has no effect.
            holds_calls: calls are told when they are complete, whatever the settings say.

        Raises:
            ApiError, ValidationError, UnsupportedError, ChatTemplateError: it cannot be answered.
        """
        model, parsing = self._state.check_model(body.model), self._state.parsing
        params = chat_params(body, self._state.engine.defaults.sampling, self._state.config.limits)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._limit(request, params, asked)
        reader = self._state.prompts
        size = reader.size_of(body)
        plan = await self._plan(request, body, size, lambda: parsing.plan(body, warnings, holds_calls=holds_calls))
        charge = self._charge(request, body, [reader.least_tokens_of(size)], params.n)
        prompt = await reader.read_chat(
            body, _cut(body, params), tenant=request.state.tenant.name, size=size,
            add_special_tokens=bool(body.add_special_tokens), warnings=warnings,
        )  # fmt: skip
        charge.correct(len(prompt.prompt_token_ids))
        reader.check_fits(len(prompt.prompt_token_ids), "messages")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._note_cut(warnings, name, asked, len(prompt.prompt_token_ids))
        if plan is not None:
            plan.constrain(params, prompt.prompt_token_ids)
        return PreparedChat(self._work(request, body, prefix, [prompt], params, charge), plan, model)

    async def _plan(
        self, request: Request, body: ChatRequest, size: int, make: Callable[[], ParsingPlan | None]
    ) -> ParsingPlan | None:
        """What is read out of the answers; long schemas of tools are looked at beside the event loop."""
        if not body.tools or size < LONG_BYTES:
            return make()
        return await self._state.workers.run(request.state.tenant.name, size, make)

    def _charge(self, request: Request, body: GenerationFields, least_tokens: list[int], n: int) -> Charge:
        """Charge the tenant for prompts that are yet to be read, each with so many tokens at least."""
        request.state.tenant.priority(_priority(request, body))  # what is refused for its fields is not charged
        self._cache_salt(request, body.cache_salt)
        num_prompts = len(least_tokens)
        return self._state.admission.begin(num_prompts * n, sum(least_tokens), request.state.tenant, num_prompts)

    async def _read_prompts(
        self,
        request: Request,
        body: CompletionRequest,
        given: list[str | list[int]],
        cut: Cut,
        charge: Charge,
        warnings: list[str],
    ) -> list[TokensPrompt]:
        """The prompts of a completion; the first that cannot fit ends it."""
        reader, prompts, num_tokens = self._state.prompts, [], 0
        for one in given:
            prompt = await reader.read(
                one, cut, tenant=request.state.tenant.name, add_special_tokens=body.add_special_tokens is not False,
                warnings=warnings,
            )  # fmt: skip
            num_tokens += len(prompt.prompt_token_ids)
            charge.correct(max(charge.num_tokens, num_tokens))
            reader.check_fits(len(prompt.prompt_token_ids))
            prompts.append(prompt)
        return prompts

    def _limit(self, request: Request, params: SamplingParams, asked: int | None) -> None:
        """Bring `params` within what the tenant may; new tokens are told as they come where it pays for them."""
        tenant: Tenant = request.state.tenant
        params.max_tokens = tenant.max_tokens(asked, params.max_tokens)
        if tenant.counts_tokens and params.output_kind is RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.CUMULATIVE

    def _work(
        self,
        request: Request,
        body: GenerationFields,
        prefix: str,
        prompts: list[TokensPrompt],
        params: SamplingParams,
        charge: Charge,
    ) -> Work:
        release(request)
        salt = self._cache_salt(request, body.cache_salt)
        if salt is not None:
            prompts = [self._state.shared_prefixes.marked(prompt) for prompt in prompts]
        work = Work(
            public_id=public_id(prefix, request.scope["state"].get(ID_KEY), body.request_id),
            prompts=prompts,
            params=params,
            priority=request.state.tenant.priority(_priority(request, body)),
            cache_salt=salt,
            received_s=getattr(request.state, "received_s", time.monotonic()),
            tenant=request.state.tenant,
            queue_timeout=body.queue_timeout,
            charge=charge,
        )
        if self._state.config.api.enable_log_requests:
            num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
            logger.info("request %s: %d prompts, %d tokens, %s", work.public_id, len(prompts), num_tokens, params)
        return work

    def _cache_salt(self, request: Request, salt: str | None) -> str | None:
        """What the prefix cache tells this request's pages apart by: the client's salt within its tenant's own."""
        if salt is not None:
            parse_prompt({"prompt_token_ids": [0], "cache_salt": salt})  # the check of its characters
        if not (self._state.tenants.needs_key and self._state.config.api.isolate_tenants):
            return salt
        return tenant_salt(request.state.tenant.name, salt)

    async def respond(self, request: Request, work: Work, writer: EventWriter, *, is_stream: bool) -> Response:
        """Run `work`, and write its answers as they come or whole.

        Raises:
            ApiError, QuireError, ClientGoneError: nothing was answered.
        """
        request.state.counts = writer.counts
        run = Run(self._state, work)
        try:
            if is_stream:
                first = await unless_gone(request.receive, self._first(run))
                return EventStream(run, first, writer, self._state.keep_alive)
            whole = await unless_gone(request.receive, collect(run, len(work.prompts)))
            return Response(writer.whole(whole), media_type=JSON)
        except BaseException:
            run.close()
            raise

    async def _first(self, run: Run) -> tuple[int, RequestOutput] | None:
        """The first output, so that a request that cannot run gets a status of its own; None when it waits long: then
        the stream is begun before.
        """
        await run.start()
        try:
            return await asyncio.wait_for(run.next(), self._state.config.api.sse_keep_alive_interval or None)
        except (TimeoutError, asyncio.TimeoutError):
            return None


async def collect(run: Run, num_prompts: int) -> list[RequestOutput]:
    """Start `run`; the final output of every prompt.

    Raises:
        ApiError, QuireError: the engine could not do it.
    """
    await run.start()
    final: list[RequestOutput | None] = [None] * num_prompts
    while not run.is_over:
        prompt_index, output = await run.next()
        final[prompt_index] = output
    return [output for output in final if output is not None]


class _HasPrompt(msgspec.Struct):
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return unread.pop() if unread else await receive()

    return next_message


def _cut(body: GenerationFields, params: SamplingParams) -> Cut:
    return Cut(body.truncate_prompt_tokens, body.truncation_side or "left", params.max_tokens or 1)


def _priority(request: Request, body: GenerationFields) -> int | None:
    """What a request asks for; the header wins over the field.

    Raises:
        ValidationError: the header is no integer of 64 bits.
    """
    header = request.headers.get(PRIORITY_HEADER)
    if header is None:
        return body.priority
    if not INTEGER.fullmatch(header.strip()):
        raise ValidationError(
            f"{PRIORITY_HEADER}: {shown(header)} is no integer", hint="lower goes first", field="priority"
        )
    return check_int("priority", int(header))


def _echoed_message(body: ChatRequest) -> str:
    """The text that the answer begins with: that of the last message, if it is to be echoed."""
    last = (body.messages or [{}])[-1]
    content = last.get("content")
    return content if body.echo and last.get("role") == "assistant" and isinstance(content, str) else ""


async def require_alive(state: ServerState) -> None:
    """Raise `EngineDeadError` unless the engine can serve."""
    if state.engine.errored:
        raise EngineDeadError("the engine has stopped")
    await state.engine.check_health()
