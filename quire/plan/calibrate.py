"""Measures what steps cost on this machine: a real engine under a range of loads, its flight recording, and the fit.

Called by `quire plan --calibrate` and the benchmark. Takes about as long as it is given, and the start of an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from quire.config import QuireConfig
from quire.config.speculative import OFF
from quire.config.speculative_forms import SpeculationSettings
from quire.engine.async_llm import AsyncLLM
from quire.flight_recorder.reader import read_recording
from quire.plan.live import LiveClient, Timing
from quire.simulator.calibration import Calibration, fit
from quire.simulator.observed import Observed, observe
from quire.simulator.workload import SimRequest

MAX_STEPS_OF_CASE = 128
CASE_S = 1.0
PROMPTS = (4, 16, 48, 100, 200, 400, 800, 1600, 3200)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
USERS = (2, 4, 8, 16, 32)
PREFIX_SHARE, PREFIX_TOKENS = 0.25, 256
SETTLE_S = 0.4
NO_DRAFTS = SpeculationSettings(speculative_config=OFF)  # plans add those that they assume
BURST_S = 2e-3
"""Requests that are sent so soon after each other came at once: the front end took in one after the other."""


def calibrate(config: QuireConfig, seconds: float, note: Callable[[str], None] = lambda line: None) -> Calibration:
    """Run an engine of this configuration, without drafts, under load for about `seconds`, and fit its costs.

    Of several replicas each is under a load of its own, all at once, and the first is measured: what they take from
    each other of the machine's memory bandwidth is then in what steps cost.

    Raises:
        QuireError: the engine cannot be built, or too little was observed.
    """
    with tempfile.TemporaryDirectory() as directory:
        observability = dataclasses.replace(
            config.observability, flight_recorder=directory, flight_recorder_max_bytes=1 << 30
        )
        plain = dataclasses.replace(config, observability=observability, speculation=NO_DRAFTS)
        engine = AsyncLLM.from_config(plain)
        try:
            num_replicas = engine.config.parallel.data_parallel_size
            clients = [LiveClient(engine, index if num_replicas > 1 else None) for index in range(num_replicas)]
            loads = [_Load(one, engine.config, seconds, note, seed) for seed, one in enumerate(clients)]
            asyncio.run(_run_all(loads))
        finally:
            engine.shutdown()
        recording = read_recording(Path(directory))
        observed = observe(recording)
    note(f"{len(observed.steps)} steps observed")
    return fit(
        observed.steps, _waits(observed, clients[0].timings), _deliveries(observed, clients[0].timings),
        request_each_s=_seconds_each([timing for client in clients for timing in client.timings.values()]),
        model=engine.config.model.served_model_name or engine.config.model.model, machine=machine_name(),
        setup=recording.head.setup, num_threads=engine.config.device.num_threads or 0, num_replicas=num_replicas,
    )  # fmt: skip


async def _run_all(loads: list[_Load]) -> None:
    await asyncio.gather(*[load.run() for load in loads])


def machine_name() -> str:
    """What a calibration says of where it was made."""
    return f"{platform.node()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


class _Load:
    """Batches of every size, prompts of every length alone and beside decoding, then users who come and go."""

    def __init__(
        self, client: LiveClient, config: QuireConfig, seconds: float, note: Callable[[str], None], seed: int
    ) -> None:
        assert config.scheduler.max_num_seqs is not None, "the engine's configuration is resolved"
        self._client = client
        self._seconds = seconds
        self._note = note if seed == 0 else lambda line: None
        self._longest = config.max_model_len
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._rng = np.random.default_rng(seed)
        self._streams = iter(range(seed * 10**9, (seed + 1) * 10**9))
        self._step_s = 0.0

    async def run(self) -> None:
        start = time.monotonic()
        await self._ask(16, 8)  # the first steps of a process are slow
        begun = time.monotonic()
        await self._ask(16, 16)
        self._step_s = (time.monotonic() - begun) / 16
        # Batches and prompts in turns, each from small to large, so that what there is time for covers a range of both.
        batches, prompts = self._batches(), self._prompts()
        for jobs in _in_turns(batches, prompts):
            await asyncio.gather(*[self._ask(*job) for job in jobs])
            if time.monotonic() - start > 0.5 * self._seconds:
                break
        users = [count for count in USERS if count <= self._max_num_seqs]
        for count in users:
            left = self._seconds - (time.monotonic() - start)
            share = left / (len(users) - users.index(count))
            self._note(f"{count} users for {share:.0f} s")
            await self._serve_users(count, time.monotonic() + share)
        await asyncio.sleep(SETTLE_S)  # the recorder writes a little later

    def _num_steps(self, batch: int) -> int:
        """Output tokens such that a batch takes about `CASE_S`."""
        guess_s = self._step_s * (1 + batch / 16)
        return int(np.clip(CASE_S / guess_s, 12, MAX_STEPS_OF_CASE))

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        for size in BATCHES:
            if size <= self._max_num_seqs:
                yield [(8 + 4 * (number % 8), self._num_steps(size)) for number in range(size)]
        for length in (256, 1024):
            if 2 * length < self._longest:
                yield [(length, self._num_steps(8))] * 8

    def _prompts(self) -> Iterator[list[tuple[int, int]]]:
        for length in PROMPTS:
            if length < self._longest - 8:
                yield [(length, 2)]
                yield [(16, 24)] * 4 + [(length, 2)] * 2

    async def _serve_users(self, count: int, until_s: float) -> None:
        async def user() -> None:
            while time.monotonic() < until_s:
                prompt = int(np.clip(self._rng.lognormal(4.6, 1.0), 4, self._longest * 3 // 4))
                output = int(np.clip(self._rng.lognormal(3.3, 0.7), 2, self._longest // 5))
                await asyncio.sleep(float(self._rng.exponential(2 * self._step_s)))
                await self._ask(prompt, output, has_prefix=self._rng.random() < PREFIX_SHARE)

        await asyncio.gather(*[user() for _ in range(count)])

    async def _ask(self, prompt_len: int, output_len: int, *, has_prefix: bool = False) -> Timing:
        """Ask with a prompt like no other, which follows a beginning that many have, if it `has_prefix`."""
        prefix_len = min(PREFIX_TOKENS, self._longest // 8) if has_prefix else 0
        prompt_len = min(prefix_len + prompt_len, self._longest - 1)
        output_len = max(1, min(output_len, self._longest - prompt_len))
        return await self._client.ask(
            SimRequest(
                arrival_s=0.0, prompt_len=prompt_len, output_len=output_len, stream=next(self._streams),
                prefix_len=prefix_len,
            )
        )  # fmt: skip


def _in_turns(
    first: Iterator[list[tuple[int, int]]], second: Iterator[list[tuple[int, int]]]
) -> Iterator[list[tuple[int, int]]]:
    """One of each as long as there is one of either."""
    sources = [first, second]
    while sources:
        source = sources.pop(0)
        found = next(source, None)
        if found is not None:
            yield found
            sources.append(source)


def _waits(observed: Observed, timings: dict[str, Timing]) -> list[float]:
    """Seconds from clients' calls to the queue, of requests that found the engine idle or between steps."""
    starts = np.array([step.end_s - step.seconds for step in observed.steps])
    ends = np.array([step.end_s for step in observed.steps])
    waits = []
    for request_id, queued_s in observed.queued.values():
        sent_s = timings[request_id].sent_s
        place = int(np.searchsorted(ends, sent_s))
        is_busy = place < len(ends) and starts[place] < sent_s
        if not is_busy:
            waits.append(queued_s - sent_s)
    return waits


def _seconds_each(timings: list[Timing]) -> float:
    """Seconds after which the next of several requests that come at once is taken in."""
    gaps = np.diff(sorted(timing.sent_s for timing in timings))
    bursts = gaps[gaps < BURST_S]
    return float(np.median(bursts)) if len(bursts) else 0.0


def _deliveries(observed: Observed, timings: dict[str, Timing]) -> list[tuple[int, float]]:
    """(tokens of a step, mean seconds from its end to their delivery)."""
    num_seen: dict[int, int] = defaultdict(int)
    points = []
    for step in observed.steps:
        delays = []
        for handle in step.handles.tolist():
            token_s = timings[observed.queued[handle][0]].token_s
            if num_seen[handle] < len(token_s):
                delays.append(token_s[num_seen[handle]] - step.end_s)
            num_seen[handle] += 1
        if delays:
            points.append((len(delays), float(np.mean(delays))))
    return points
