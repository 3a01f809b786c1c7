"""Runs the requests of a batch, so many at once, and writes each result when it is there. Owns the counts of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.batch.endpoints import Endpoint
from quire.batch.files import RequestFile, ResultFile
from quire.batch.lines import BadLine, BatchRequest, error_line, result_line
from quire.errors import QuireServerError
from quire.logger import get_logger
from quire.utils.checks import shown

PROGRESS_S = 1.0
MAX_SHOWN, MAX_WARNED = 8, 100

logger = get_logger(__name__)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(slots=True)
class BatchCounts:
    """What became of the lines of a batch.

    Attributes:
        num_done: answered before this run.
        num_answered, num_failed, num_bad: requests with status 200, with another one, and invalid lines.
    """

    num_lines: int
    num_done: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_bad: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def num_ended(self) -> int:
        """Lines that have their result."""
        return self.num_done + self.num_answered + self.num_failed + self.num_bad

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.started_s, 1e-9)
        return (
            f"{self.num_ended}/{self.num_lines} lines: {self.num_answered} answered, {self.num_failed} failed, "
            f"{self.num_bad} invalid, {self.num_done} already done; {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_output_tokens} output tokens ({self.num_output_tokens / seconds:.1f}/s)"
        )


async def run_batch(
    requests: RequestFile,
    results: ResultFile,
    endpoint: Endpoint,
    *,
    max_concurrency: int,
    seed: int | None,
    on_progress: Callable[[BatchCounts], None],
    is_strict: bool = False,
) -> BatchCounts:
    """Ask every request that has no result yet.

    Args:
        seed: of requests that bring none, together with their custom_id; None = they go as they are.
        on_progress: called at most once a second.
        is_strict: lines with fields that have no effect are refused, where else the log names them.

    Raises:
        QuireServerError: the endpoint takes no more requests; what was written stays.
    """
    counts = BatchCounts(requests.num_lines)
    run = _Run(results, endpoint, seed, counts, is_strict=is_strict)
    turns = asyncio.Semaphore(max_concurrency)
    tasks: set[asyncio.Task[None]] = set()
    shown_s = time.monotonic()
    try:
        for entry in requests:
            if results.finished.has(entry):
                counts.num_done += 1
                continue
            await turns.acquire()
            run.check()
            task = asyncio.ensure_future(run.do(entry))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: turns.release())
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                on_progress(counts)
        while tasks:
            await asyncio.wait(tasks, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            run.check()
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                on_progress(counts)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return counts


class _Run:
    def __init__(
        self, results: ResultFile, endpoint: Endpoint, seed: int | None, counts: BatchCounts, *, is_strict: bool
    ) -> None:
        self._results = results
        self._endpoint = endpoint
        self._seed = seed
        self._counts = counts
        self._is_strict = is_strict
        self._warned: set[str] = set()
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what ended the run, if anything did."""
        if self._error is not None:
            raise self._error

    async def do(self, entry: BatchRequest | BadLine) -> None:
        try:
            if isinstance(entry, BatchRequest) and entry.unknown:
                entry = self._with_unknown(entry)
            if isinstance(entry, BadLine):
                self._results.write(error_line(entry))
                self._counts.num_bad += 1
            else:
                await self._ask(entry)
        except Exception as error:  # `check` raises it where the run can end
            self._error = self._error or error

    def _with_unknown(self, request: BatchRequest) -> BatchRequest | BadLine:
        """A request whose line has fields that are not known: each name is reported once, or the line refused."""
        names = ", ".join(shown(name) for name in request.unknown[:MAX_SHOWN])
        if self._is_strict:
            message = f"the line has unknown fields: {names}; leave them out, or move them into body"
            return BadLine(request.line, request.custom_id, message)
        if len(self._warned) < MAX_WARNED and not self._warned.issuperset(request.unknown):
            self._warned.update(request.unknown[:MAX_SHOWN])
            logger.warning("line %d: unknown fields have no effect: %s", request.line, names)
        return request

    async def _ask(self, request: BatchRequest) -> None:
        body = request.body if self._seed is None else request.with_seed(self._seed)
        reply = await self._endpoint.ask(request.url, body, request.request_id)
        if not reply.is_final:
            raise QuireServerError(
                f"stopped sending requests: {reply.status or ''} {reply.body[:300].decode('utf-8', 'replace')}",
                hint="results so far are in the output file; run the same command again to resume",
            )
        self._results.write(result_line(request, reply.status, reply.request_id, reply.body))
        if reply.status != 200:
            self._counts.num_failed += 1
            return
        self._counts.num_answered += 1
        usage = _usage(reply.body)
        self._counts.num_prompt_tokens += usage.prompt_tokens
        self._counts.num_output_tokens += usage.completion_tokens


def _usage(body: bytes) -> _Usage:
    try:
        return msgspec.json.decode(body, type=_Body).usage or _Usage()
    except ValueError:  # a server of another make that counts differently
        return _Usage()
