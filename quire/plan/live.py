"""Requests of a trace, sent to a real engine in real time and timed as their clients see them.

Used by calibrations and by the benchmark that holds predictions against reality. Owns nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.simulator.results import Results
from quire.simulator.workload import FIRST_TOKEN, SimRequest


@dataclass(slots=True)
class Timing:
    """One request as its client saw it; seconds on the monotonic clock.

    Attributes:
        token_s: when each token came.
    """

    request_id: str
    sent_s: float
    token_s: list[float] = field(default_factory=list)


class LiveClient:
    """Sends requests to an engine.

    Args:
        replica: of a data-parallel engine that all requests go to; None = its own placement.

    Attributes:
        timings: of all requests so far, by request id.
    """

    def __init__(self, engine: AsyncLLM, replica: int | None = None) -> None:
        assert engine.config.arch is not None, "the engine's configuration is resolved"
        self._engine, self._replica = engine, replica
        self._vocab_size = engine.config.arch.vocab_size
        self._numbers = itertools.count()
        self.timings: dict[str, Timing] = {}

    async def ask(self, request: SimRequest) -> Timing:
        """Send one request now, and wait for its end."""
        span = self._vocab_size - 2 * FIRST_TOKEN
        prompt = {"prompt_token_ids": (FIRST_TOKEN + request.prompt() % span).tolist()}
        params = SamplingParams(
            max_tokens=request.output_len, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
        )
        of_replica = "" if self._replica is None else f"{self._replica}-"
        timing = Timing(f"plan-{of_replica}{next(self._numbers)}", time.monotonic())
        self.timings[timing.request_id] = timing
        async for output in self._engine.generate(prompt, params, timing.request_id, data_parallel_rank=self._replica):
            now = time.monotonic()
            timing.token_s += [now] * len(output.outputs[0].token_ids)
        return timing

    async def run(self, requests: Sequence[SimRequest]) -> Results:
        """Send each request at its time, and wait for all."""
        loop = asyncio.get_running_loop()
        start, loop_start = time.monotonic(), loop.time()

        async def send(request: SimRequest) -> Timing:
            await asyncio.sleep(max(0.0, loop_start + request.arrival_s - loop.time()))
            return await self.ask(request)

        timings = await asyncio.gather(*[send(request) for request in requests])
        return results_of(
            [(request.prompt_len, timing) for request, timing in zip(requests, timings, strict=True)], start
        )


def results_of(timed: Sequence[tuple[int, Timing]], start_s: float) -> Results:
    """Measured requests, (prompt length, timing) each, in the form of a simulation's results."""
    results = Results(len(timed))
    for number, (prompt_len, timing) in enumerate(timed):
        results.sent(number, timing.sent_s - start_s, prompt_len)
        for moment in timing.token_s:
            results.delivered(np.array([number]), moment - start_s)
        results.finished(number, timing.token_s[-1] - start_s)
    return results
