"""ChatService: a conversation or prompts made into work for the engine, run, and answered. Each API stands on it.

Made by `server.app.make_app`; owns nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.core.cache_salt import tenant_salt
from quire.core.inputs import TokensPrompt, parse_prompt
from quire.core.outputs import RequestOutput
from quire.core.request_options import RequestOptions
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.errors import ValidationError
from quire.logger import get_logger
from quire.server.chat.parsing import ParsingPlan
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.chat import ChatRequest, chat_params
from quire.server.chat.protocol.generation import GenerationFields, warn_beside_beams
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.reading import release
from quire.server.chat.running import GenerationJob, Run, unless_gone
from quire.server.chat.sse import EventStream, EventWriter
from quire.server.chat.state import ServerState, public_id
from quire.server.http.errors import ApiError
from quire.server.http.prompt_workers import LONG_BYTES
from quire.server.http.request_scope import scope_of
from quire.server.http.tenants import Charge
from quire.utils.checks import check_int, shown

logger = get_logger(__name__)

JSON = "application/json"
PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
BAD_ID = "X-Request-Id is ignored: it has characters other than letters, digits, _ - . : +, or more than 128"
INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation that can be run.

    Attributes:
        plan: what is read out of the answers; None = they are plain text.
        model: name to report.
    """

    work: GenerationJob
    plan: ParsingPlan | None
    model: str


class ChatService:
    """What the routes of all APIs share."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def read(self, request: Request, fields: RequestFields[Any]) -> tuple[Any, Warnings]:
        """The typed body of a request that is metered, and warnings about fields that were not used.

        Raises:
            ApiError, ClientGoneError, ValidationError, UnsupportedError: as `BodyReader.read_fields`, no new work is
                taken, or the tenant is at a limit.
        """
        state, known = self._state, scope_of(request)
        known.is_metered = True
        state.refuse_new_work()
        # Limits come before the body is received and decoded, so that a flood of refused ones costs little.
        try:
            known.tenant.check(num_tokens=1)
        except ApiError:
            state.bodies.note_unread(request)
            raise
        body, warnings = await state.bodies.read_fields(request, fields)
        if known.has_unusable_id:
            warnings.add("X-Request-Id", BAD_ID, "send 1 to 128 letters, digits, _ - . : +")
        return body, warnings

    async def prepare_chat(
        self, request: Request, body: ChatRequest, prefix: str, warnings: Warnings, *, buffers_tool_calls: bool = False
    ) -> PreparedChat:
        """A conversation as work for the engine; other APIs translate theirs into a `ChatRequest` first.

        Args:
            prefix: of the answer's id.
            warnings: gets each field that has no effect.
            buffers_tool_calls: calls are sent when they are complete, whatever the settings say.

        Raises:
            ApiError, ValidationError, UnsupportedError, ChatTemplateError: it cannot be answered.
        """
        model, parsing = self._state.check_model(body.model), self._state.parsing
        params = chat_params(body, self._state.engine.defaults.sampling, self._state.config.limits)
        warn_beside_beams(body, warnings)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.max_tokens not in (None, asked):
            warnings.add("max_tokens", "max_tokens has no effect: max_completion_tokens is given")
        self.limit(request, params, asked)
        reader = self._state.prompts
        size = reader.size_of(body)
        plan = await self._plan(
            request, body, size, lambda: parsing.plan(body, warnings, buffers_tool_calls=buffers_tool_calls)
        )
        charge = self.charge(request, body, [reader.least_tokens_of(size)], params.n)
        prompt = await reader.read_chat(
            body, cut_of(body, params), tenant=scope_of(request).tenant.name, size=size,
            add_special_tokens=bool(body.add_special_tokens), warnings=warnings,
        )  # fmt: skip
        charge.correct(len(prompt.prompt_token_ids))
        reader.check_fits(len(prompt.prompt_token_ids), "messages")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.note_cut(warnings, name, asked, len(prompt.prompt_token_ids))
        if plan is not None:
            plan.constrain(params, prompt.prompt_token_ids)
        return PreparedChat(self.work(request, body, prefix, [prompt], params, charge), plan, model)

    async def _plan(
        self, request: Request, body: ChatRequest, size: int, make: Callable[[], ParsingPlan | None]
    ) -> ParsingPlan | None:
        """What is read out of the answers; long schemas of tools are looked at beside the event loop."""
        if not body.tools or size < LONG_BYTES:
            return make()
        return await self._state.workers.run(scope_of(request).tenant.name, size, make)

    def charge(self, request: Request, body: GenerationFields, least_tokens: list[int], n: int) -> Charge:
        """Charge the tenant for prompts that are yet to be read, each with so many tokens at least."""
        scope_of(request).tenant.priority(_priority(request, body))  # what is refused for its fields is not charged
        self._cache_salt(request, body.cache_salt)
        num_prompts = len(least_tokens)
        return self._state.admission.begin(num_prompts * n, sum(least_tokens), scope_of(request).tenant, num_prompts)

    def note_cut(self, warnings: Warnings, field: str, asked: int | None, num_prompt_tokens: int) -> None:
        """Name what of an answer cannot come, as prompt and answer have the model's length together."""
        room = self._state.prompts.max_model_len - num_prompt_tokens
        if asked is not None and asked > room:
            text = f"{asked} tokens were requested, but max_model_len leaves {room} after this prompt"
            warnings.add(field, text, f"request at most {room}, or shorten the prompt")

    def limit(self, request: Request, params: SamplingParams, asked: int | None) -> None:
        """Bring `params` within what the tenant may; new tokens are reported as they come where it pays for them."""
        params.check_transfer_params(has_connector=self._state.engine.config.kv_transfer is not None)
        tenant = scope_of(request).tenant
        params.max_tokens = tenant.max_tokens(asked, params.max_tokens)
        if tenant.counts_tokens and params.output_kind is RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.CUMULATIVE

    def work(
        self,
        request: Request,
        body: GenerationFields,
        prefix: str,
        prompts: list[TokensPrompt],
        params: SamplingParams,
        charge: Charge,
    ) -> GenerationJob:
        """Work for the engine, of prompts that were read; the bytes of the body are given back."""
        release(request)
        known = scope_of(request)
        salt = self._cache_salt(request, body.cache_salt)
        if salt is not None:
            prompts = [self._state.shared_prefixes.marked(prompt) for prompt in prompts]
        options = RequestOptions(
            priority=known.tenant.priority(_priority(request, body)), tenant=known.tenant.share,
            queue_timeout=body.queue_timeout, cache_salt=salt, add_special_tokens=False,
            data_parallel_rank=_data_parallel_rank(request),
        )  # fmt: skip
        work = GenerationJob(
            public_id=public_id(prefix, known.request_id, body.request_id),
            prompts=prompts,
            params=params,
            options=options,
            received_s=known.received_s,
            tenant=known.tenant,
            key=known.key,
            charge=charge,
        )
        if self._state.config.api.enable_log_requests:
            num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
            logger.info("request %s: %d prompts, %d tokens, %s", work.public_id, len(prompts), num_tokens, params)
        return work

    def _cache_salt(self, request: Request, salt: str | None) -> str | None:
        """The salt of this request's blocks in the prefix cache: the client's salt within its tenant's own."""
        if salt is not None:
            parse_prompt({"prompt_token_ids": [0], "cache_salt": salt})  # the check of its characters
        if not (self._state.tenants.needs_key and self._state.config.api.isolate_tenants):
            return salt
        return tenant_salt(scope_of(request).tenant.name, salt)

    async def respond(self, request: Request, work: GenerationJob, writer: EventWriter, *, is_stream: bool) -> Response:
        """Run `work`, and write its answers as they come or whole.

        Raises:
            ApiError, QuireError, ClientGoneError: nothing was answered.
        """
        scope_of(request).answer = writer.counts
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


def cut_of(body: GenerationFields, params: SamplingParams) -> Truncation:
    """How a prompt is to be truncated, as `body` asks."""
    return Truncation(body.truncate_prompt_tokens, body.truncation_side or "left", params.max_tokens or 1)


def _data_parallel_rank(request: Request) -> int | None:
    """The replica that a request's header asks for.

    Raises:
        ValidationError: the header is no number.
    """
    header = request.headers.get(RANK_HEADER)
    if header is None:
        return None
    if not INTEGER.fullmatch(header.strip()):
        raise ValidationError(
            f"{RANK_HEADER}: {shown(header)} is not a valid integer", hint="leave it out", field="data_parallel_rank"
        )
    return check_int("data_parallel_rank", int(header), 0)


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
            f"{PRIORITY_HEADER}: {shown(header)} is not a valid integer", hint="lower runs first", field="priority"
        )
    return check_int("priority", int(header))
