"""Run: what a request asks for, in the engine: a stream a prompt, counted in and out, always ended.

Made by the routes. Outputs are pushed: the engine's step calls `on_ready`, and the writer of the response takes what
there is; what is not taken is merged (`engine.output_stream`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.core.inputs import TokensPrompt
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.live_request import LiveRequest
from quire.engine.output_stream import OutputStream, noop, until_ready
from quire.errors import QueueTimeoutError, QuireClientError, QuireServerError
from quire.server.chat.state import ServerState
from quire.server.http.admission import Ticket
from quire.server.http.errors import (
    INTERNAL,
    QUEUE_TIMEOUT,
    REQUEST_FAILED,
    WAITED_TOO_LONG,
    ApiError,
    ClientGoneError,
)
from quire.server.http.tenants import Charge, Tenant
from quire.server.usage.ledger import TokenUse

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What is asked of the engine.

    Attributes:
        public_id: the answer's id.
        prompts: one or many, all with the same `params`.
        options: of each prompt.
        received_s: when the request came, monotonic clock.
        tenant: whose it is, by the key of this fingerprint.
        charge: what it was charged before its prompts were read.
        placed: each prompt as the engine's supervisor has it, as far as it was given one.
    """

    public_id: str
    tenant: Tenant
    prompts: list[TokensPrompt]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    received_s: float = 0.0
    key: str = ""
    charge: Charge | None = None
    placed: list[LiveRequest] = field(default_factory=list)


class Run:
    """One request under way.

    Args:
        state: of the server.
        work: what is asked.

    Attributes:
        on_ready: called within the engine's step when `take` has something new; quick, raises nothing.
        ready: parts that have something; they add themselves.
        is_over: every output was taken, or the request was closed.
    """

    __slots__ = (
        "_error",
        "_feeder",
        "_num_unopened",
        "_parts",
        "_state",
        "_ticket",
        "_work",
        "is_over",
        "on_ready",
        "ready",
    )

    def __init__(self, state: ServerState, work: GenerationJob) -> None:
        self._state = state
        self._work = work
        self._ticket: Ticket | None = None
        self._parts: list[_Part] = []
        self._feeder: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._num_unopened = len(work.prompts)
        self.ready: list[_Part] = []
        self.on_ready: Callable[[], None] = noop
        self.is_over = False

    async def start(self) -> None:
        """Give the work to the engine; followed by `close`, whatever becomes of it.

        Raises:
            ApiError: too much waits.
            QuireError: as `EngineClient.open_stream`.
        """
        state, work = self._state, self._work
        num_tokens = sum(len(prompt.prompt_token_ids) for prompt in work.prompts)
        num_answers = len(work.prompts) * work.params.n
        self._ticket = state.admission.enter(num_answers, num_tokens, work.tenant, work.params.max_tokens, work.charge)
        num_places = state.places.needed(work.params.n)
        for index in range(len(work.prompts)):
            if index and not state.places.try_take(num_places):
                self._feeder = asyncio.ensure_future(self._open_rest(index, num_places))
                return
            await self._open(index, num_places if index else 0)

    async def _open_rest(self, first: int, num_places: int) -> None:
        """Give the engine the prompts from `first` on, as places become free."""
        try:
            for index in range(first, len(self._work.prompts)):
                await self._state.places.take(num_places)
                await self._open(index, num_places)
        except (QuireServerError, QuireClientError) as error:
            self._error = error
            self.on_ready()

    async def _open(self, index: int, num_places: int) -> None:
        """Give the engine one prompt, which holds so many places until it ends."""
        state, work = self._state, self._work
        prompt = work.prompts[index]
        engine_id = state.engine_id(work.public_id)
        account = _RequestMetrics(state, work, len(prompt.prompt_token_ids))
        try:
            stream = await state.engine.open_stream(prompt, work.params, engine_id, work.options)
        except BaseException as error:
            state.places.give_back(num_places)
            if isinstance(error, QuireServerError):
                account.close("error")
            raise
        state.running.add(engine_id)
        if stream.placed is not None:
            work.placed.append(stream.placed)
        part = _Part(self, index, engine_id, stream, account, num_places)
        self._parts.append(part)
        self._num_unopened -= 1
        stream.on_ready = part.note_ready
        if stream.is_ready:
            part.note_ready()

    def take(self) -> tuple[int, RequestOutput] | None:
        """The next (index of the prompt, output) that has come; None when there is none now.

        Raises:
            ApiError, QuireError: the engine could not do it; nothing more comes.
        """
        if self._error is not None:
            raise self._error
        if not self.ready:
            return None
        part = self.ready.pop()
        try:
            output = part.stream.take()
        except QuireClientError:  # it never ran
            part.account.forget()
            raise
        except QueueTimeoutError:
            part.account.close("queue_timeout")
            wait_s = self._state.admission.predicted_wait_s()
            raise ApiError(QUEUE_TIMEOUT, WAITED_TOO_LONG, param="queue_timeout", retry_after_s=wait_s) from None
        except QuireServerError:
            part.account.close("error")
            raise
        assert output is not None, "a stream is ready when it has an output or an error"
        part.account.note(output)
        if output.finished:
            self._parts.remove(part)
            self._state.running.discard(part.engine_id)
            self._state.places.give_back(part.num_places)
            if not self._parts and not self._num_unopened:
                self.close()
        return part.index, output

    async def next(self) -> tuple[int, RequestOutput]:
        """As `take`, but waits."""
        while (item := self.take()) is None:
            await until_ready(self)
        return item

    def close(self) -> None:
        """End what still runs; harmless when repeated."""
        self.is_over, self.on_ready = True, noop
        self.ready.clear()
        if self._ticket is not None:
            self._state.admission.leave(self._ticket)
            self._ticket = None
        if self._feeder is not None:
            self._feeder.cancel()
        parts, self._parts = self._parts, []
        for part in parts:
            self._state.places.give_back(part.num_places)
            self._state.running.discard(part.engine_id)
            part.account.close("abort")
            part.stream.close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await cancelled(gone)
        await cancelled(task)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel `task`, if it has not ended, and wait until it has."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(slots=True, eq=False)
class _Part:
    """One prompt's share of a run."""

    run: Run
    index: int
    engine_id: str
    stream: OutputStream
    account: _RequestMetrics
    num_places: int

    def note_ready(self) -> None:
        """The stream has something."""
        self.run.ready.append(self)
        self.run.on_ready()


class _RequestMetrics:
    """Counts one engine request for the metrics."""

    def __init__(self, state: ServerState, work: GenerationJob, num_prompt_tokens: int) -> None:
        self._metrics = state.metrics
        self._record_tokens = state.metrics.record_tokens
        self._admission = state.admission
        self._params = params = work.params
        self._tenant = work.tenant
        self._accounts, self._account = state.parts.accounts, (work.tenant.name, work.key, state.model_names[0])
        self._is_cumulative = params.output_kind is RequestOutputKind.CUMULATIVE
        self._num_tokens = [0] * params.n  # by answer
        self._num_prompt_tokens = num_prompt_tokens
        self._last_token_s = 0.0
        self._num_cached = 0
        self._is_counted = False
        self.num_open = params.n

    def note(self, output: RequestOutput) -> None:
        """Take in an output.

        Raises:
            ApiError: an answer failed.
        """
        self._note_intervals(output)
        failed = False
        for answer in output.outputs:
            if answer.finish_reason is not None:
                self.num_open -= 1
                self._metrics.record_finish(answer.finish_reason, output.metrics.engine_index)
                failed = failed or answer.finish_reason == "error"
        if output.finished:
            self.num_open = 0
            self._admission.note_answers(output.metrics.num_generation_tokens, self._params.n)
            num_cached = output.num_cached_tokens or 0
            self._metrics.record_request(
                output.metrics, self._params, self._num_prompt_tokens, num_cached, max(self._num_tokens)
            )
            use = TokenUse(1, self._num_prompt_tokens, num_cached, output.metrics.num_generation_tokens)
            self._accounts.add(*self._account, use)
            self._is_counted = True
        if failed:
            raise ApiError(INTERNAL, REQUEST_FAILED)

    def forget(self) -> None:
        """It never ran."""
        self.num_open, self._is_counted = 0, True

    def close(self, reason: str) -> None:
        """What has not ended by itself ends for `reason`."""
        for _ in range(self.num_open):
            self._metrics.record_finish(reason)
        self.num_open = 0
        if not self._is_counted:  # a prompt counts once a token has come of it: it was computed then
            self._is_counted, num_generated = True, sum(self._num_tokens)
            prompt = (self._num_prompt_tokens, self._num_cached) if num_generated else (0, 0)
            self._accounts.add(*self._account, TokenUse(1, *prompt, num_generated))

    def _num_new(self, answer: CompletionOutput) -> int:
        """Tokens of `answer` that were not counted yet."""
        num_new = len(answer.token_ids)
        if self._is_cumulative:
            num_new -= self._num_tokens[answer.index]
        self._num_tokens[answer.index] += num_new
        return num_new

    def _note_intervals(self, output: RequestOutput) -> None:
        """From the last output's token to this one's; of an answer that comes whole, the mean."""
        last_token_s, self._num_cached = output.metrics.last_token_ts, output.num_cached_tokens or 0
        if len(output.outputs) == 1:  # nearly always
            steps = total = self._num_new(output.outputs[0])
        else:
            counts = [self._num_new(answer) for answer in output.outputs]
            steps, total = max(counts, default=0), sum(counts)
        if not steps:
            return
        if self._tenant.counts_tokens:
            self._tenant.charge(total)
        if self._last_token_s:
            self._record_tokens((last_token_s - self._last_token_s) / steps, total)
        elif steps > 1:
            mean = (last_token_s - output.metrics.first_token_ts) / (steps - 1)
            self._record_tokens(mean, total - len(output.outputs))
        self._last_token_s = last_token_s
