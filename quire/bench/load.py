"""Sends the requests of one client process at their times and keeps what comes back.

Called by `processes` (here or in a child). Owns nothing but what it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.bench.client_watch import LagProbe, measure_health
from quire.bench.connection import Clock, ConnectionPool, request_bytes
from quire.bench.records import Failure, Load, LoadReport, RequestRecord
from quire.utils.garbage import collector_paused

DISPATCHES_PER_TURN = 16
NO_STREAM = Failure("no stream", "the response is not text/event-stream")
Result = TypeVar("Result")
Progress = Callable[[RequestRecord], None]


def run_on_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` on a new event loop, the fastest there is."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(work)
    return uvloop.run(work)


async def run_load(load: Load, on_end: Progress | None = None, clock: Clock = time.monotonic) -> LoadReport:
    """Send every request of `load`; returns when all have ended.

    Args:
        on_end: called with each record.
        clock: seconds, monotonic.
    """
    pool = ConnectionPool(load.target, clock)
    sender = _Sender(load, pool, on_end, clock)
    requests = [request_bytes(load.target, job.body.encode()) for job in load.jobs]
    probe = LagProbe(clock)
    gc.collect()
    with collector_paused():
        if load.start_s is not None:
            await asyncio.sleep(load.start_s - clock())
        start_s = clock() if load.start_s is None else load.start_s
        cpu_s = time.process_time()
        probing = asyncio.ensure_future(probe.run())
        try:
            records = await sender.send_all(requests, start_s)
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            pool.close()
        cpu_s, wall_s = time.process_time() - cpu_s, clock() - start_s
    health = measure_health(records, probe.lags_s, cpu_s=cpu_s, wall_s=wall_s, has_rate=load.has_rate)
    return LoadReport(start_s, records, health)


class _Sender:
    def __init__(self, load: Load, pool: ConnectionPool, on_end: Progress | None, clock: Clock) -> None:
        self._load = load
        self._pool = pool
        self._on_end = on_end
        self._clock = clock
        self._turns = asyncio.Semaphore(load.max_concurrency or len(load.jobs) or 1)

    async def send_all(self, requests: list[bytes], start_s: float) -> list[RequestRecord]:
        tasks = []
        try:
            for number, (job, request) in enumerate(zip(self._load.jobs, requests, strict=True)):
                due_s = start_s + job.due_s
                wait_s = due_s - self._clock()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                elif number % DISPATCHES_PER_TURN == 0:
                    await asyncio.sleep(0)  # answers that are there come first
                tasks.append(asyncio.ensure_future(self._send(job.index, request, due_s, self._clock())))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, index: int, request: bytes, due_s: float, dispatched_s: float) -> RequestRecord:
        async with self._turns:
            started_s = self._clock()
            answer = await self._pool.ask(request, self._load.timeout_s)
        reader = answer.reader
        record = RequestRecord(
            index=index, due_s=due_s, dispatched_s=dispatched_s, started_s=started_s,
            ended_s=answer.ended_s, event_times=reader.event_times,
        )  # fmt: skip
        record.failure = answer.failure
        if record.failure is None and reader.last_choice_s is None:
            record.failure = NO_STREAM
        if record.failure is None and reader.last_choice_s is not None:
            record.ended_s = reader.last_choice_s
            record.num_prompt_tokens = reader.num_prompt_tokens
            record.num_output_tokens, record.token_source = reader.output_tokens
        if self._on_end is not None:
            self._on_end(record)
        return record
