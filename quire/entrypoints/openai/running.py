"""Runs what a request asks for: one engine request a prompt, their outputs as one stream, counted and always ended.

Called by the routes. Leaving the stream early, in any state, ends its engine requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.core.inputs import TokensPrompt
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.entrypoints.openai.admission import Ticket
from quire.entrypoints.openai.errors import INTERNAL, REQUEST_FAILED, ApiError
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.tenants import Tenant
from quire.errors import QuireClientError, QuireServerError

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
Receive = Callable[[], Awaitable[Any]]


class ClientGoneError(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked of the engine.

    Attributes:
        public_id: the answer's id.
        prompts: one or many, all with the same `params`.
        cache_salt: what the prefix cache tells requests apart by.
        received_s: when the request came, monotonic clock.
        tenant: whose it is.
    """

    public_id: str
    tenant: Tenant
    prompts: list[TokensPrompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    received_s: float = 0.0


def run(state: ServerState, work: Work) -> Outputs:
    """(index of the prompt, output) as they come.

    Raises:
        ApiError: too much waits, or the engine could not do it.
        QuireError: as `EngineClient.generate`.
    """
    return _one(state, work, 0, is_all=True) if len(work.prompts) == 1 else _merged(state, work)


def _enter(state: ServerState, work: Work) -> Ticket:
    num_tokens = sum(len(prompt.prompt_token_ids) for prompt in work.prompts)
    return state.admission.enter(len(work.prompts) * work.params.n, num_tokens, work.tenant, work.params.max_tokens)


async def _one(state: ServerState, work: Work, index: int, *, is_all: bool = False) -> Outputs:
    """The outputs of one prompt; `is_all` counts the whole request in and out."""
    ticket = _enter(state, work) if is_all else None
    engine, prompt = state.engine, work.prompts[index]
    engine_id = state.engine_id(work.public_id)
    account = _Account(state, work, len(prompt.prompt_token_ids))
    state.running.add(engine_id)
    try:
        async for output in engine.generate(
            prompt, work.params, engine_id, priority=work.priority, cache_salt=work.cache_salt, add_special_tokens=False
        ):
            account.note(output)
            yield index, output
    except QuireClientError:  # it never ran
        account.num_open = 0
        raise
    except QuireServerError:
        account.close("error")
        raise
    finally:
        if ticket is not None:
            state.admission.leave(ticket)
        state.running.discard(engine_id)
        if account.num_open:
            account.close("abort")
            await engine.abort(engine_id)


async def _merged(state: ServerState, work: Work) -> Outputs:
    """The outputs of several prompts; the first failure ends all of them."""
    ticket = _enter(state, work)
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(work.prompts))

    async def follow(index: int) -> None:
        try:
            async with aclosing(_one(state, work, index)) as outputs:
                async for pair in outputs:
                    await queue.put(pair)
            await queue.put(None)
        except Exception as error:  # handed to the reader, which raises it
            await queue.put(error)

    tasks = [asyncio.create_task(follow(index)) for index in range(len(work.prompts))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        state.admission.leave(ticket)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


class _Account:
    """Counts one engine request for the metrics."""

    def __init__(self, state: ServerState, work: Work, num_prompt_tokens: int) -> None:
        self._metrics = state.metrics
        self._admission = state.admission
        self._params = params = work.params
        self._tenant = work.tenant
        self._is_cumulative = params.output_kind is RequestOutputKind.CUMULATIVE
        self._num_tokens = [0] * params.n  # by answer
        self._num_prompt_tokens = num_prompt_tokens
        self._last_token_s = 0.0
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
                self._metrics.record_finish(answer.finish_reason)
                failed = failed or answer.finish_reason == "error"
        if output.finished:
            self.num_open = 0
            self._admission.note_answers(output.metrics.num_generation_tokens, self._params.n)
            self._metrics.record_request(
                output.metrics, self._params, self._num_prompt_tokens, output.num_cached_tokens or 0,
                max(self._num_tokens),
            )  # fmt: skip
        if failed:
            raise ApiError(INTERNAL, REQUEST_FAILED)

    def close(self, reason: str) -> None:
        """What has not ended by itself ends for `reason`."""
        for _ in range(self.num_open):
            self._metrics.record_finish(reason)
        self.num_open = 0

    def _num_new(self, answer: CompletionOutput) -> int:
        """Tokens of `answer` that were not counted yet."""
        num_new = len(answer.token_ids)
        if self._is_cumulative:
            num_new -= self._num_tokens[answer.index]
        self._num_tokens[answer.index] += num_new
        return num_new

    def _note_intervals(self, output: RequestOutput) -> None:
        """From the last output's token to this one's; of an answer that comes whole, the mean."""
        last_token_s = output.metrics.last_token_ts
        if len(output.outputs) == 1:  # nearly always
            answer = output.outputs[0]
            if self._is_cumulative:
                steps = total = self._num_new(answer)
            else:
                steps = total = len(answer.token_ids)
                self._num_tokens[answer.index] += total
        else:
            counts = [self._num_new(answer) for answer in output.outputs]
            steps, total = max(counts, default=0), sum(counts)
        if not steps:
            return
        if self._tenant.counts_tokens:
            self._tenant.charge(total)
        if self._last_token_s:
            self._metrics.record_tokens((last_token_s - self._last_token_s) / steps, total)
        elif steps > 1:
            mean = (last_token_s - output.metrics.first_token_ts) / (steps - 1)
            self._metrics.record_tokens(mean, total - len(output.outputs))
        self._last_token_s = last_token_s
