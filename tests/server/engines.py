"""Engines for the server's tests: one that emits tokens by rule, one that steps a real engine in a thread."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.cache_info import CacheMiss
from quire.core.draft_stats import DraftOutcomes, DraftStats
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.live_state import EngineState
from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
from quire.core.process_stats import CoreProcesses
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.speculation_stats import SpeculationStats
from quire.core.stats import EventKind, RequestEvent, RequestStateStats, SchedulerStats
from quire.core.tenancy import TenantShare
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_stream import OutputStream
from quire.engine.protocol import StepListener
from quire.errors import EngineDeadError, EngineGenerateError
from quire.models.hub import resolve_model_path
from quire.tokenization.chat_template import load_chat_template
from quire.tokenization.tokenizer import load_tokenizer

VOCAB_SIZE, MAX_MODEL_LEN = 3072, 2048


def scripted_config(**settings: Any) -> QuireConfig:
    """As if resolved for the embedded model."""
    return build_config(
        **{"model": "leaf", "served_model_name": "leaf", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, **settings}
    )


def rule(prompt: list[int], seed: int, position: int) -> int:
    """The token at `position` of the answer: printable, different for each prompt and seed."""
    return 100 + (sum(prompt) * 31 + seed * 7919 + position * 104729) % 2500


class Pumped:
    """`open_stream` of an engine that has `generate`: a task puts into the stream what it reads there.

    Attributes:
        waits_for_readers: the next output is asked for when the last one was taken.
    """

    waits_for_readers = True

    async def open_stream(
        self, prompt: Any, params: SamplingParams, request_id: str, options: RequestOptions = DEFAULT_OPTIONS
    ) -> OutputStream:
        async def pump() -> None:
            try:
                async for output in self.generate(prompt, params, request_id, options):  # type: ignore[attr-defined]
                    stream.put(output)
                    while self.waits_for_readers and stream._output is not None:
                        await asyncio.sleep(0)
            except Exception as error:
                stream.fail(error)

        stream = OutputStream(
            is_delta=params.output_kind is RequestOutputKind.DELTA, on_close=lambda: task.cancel() and None
        )
        task = asyncio.ensure_future(pump())
        return stream


@dataclass
class ScriptedEngine(Pumped):
    """Emits `rule`'s tokens, one a turn of the event loop (or every `interval_s`).

    Attributes:
        live: requests that run, by id; `peak` the most there were at once.
        fails_after: tokens after which every request fails; `dies_after` the same for the engine.
        holds: while set, nothing is emitted.
        drafts: what is said of every request's drafts.
        states: what the engine says of its cores.
    """

    config: QuireConfig = field(default_factory=scripted_config)
    interval_s: float = 0.0
    fails_after: int | None = None
    dies_after: int | None = None
    holds: bool = False
    drafts: DraftStats | None = None
    is_paused: bool = False
    is_profiled: bool = False
    errored: bool = False
    num_restarts: int = 0
    num_resumed: int = 0
    states: Sequence[EngineState] = ()

    def __post_init__(self) -> None:
        path = resolve_model_path("leaf", None, None)
        self.tokenizer = load_tokenizer(path)
        self.chat_template = load_chat_template(self.tokenizer)
        self.defaults = GenerationDefaults(eos_token_id=2)
        self.step_listeners: list[StepListener] = []
        self.live: dict[str, SamplingParams] = {}
        self.aborted: list[str] = []
        self.salts: list[str | None] = []
        self.prompts: list[list[int]] = []
        self.priorities: list[int] = []
        self.tenants: list[TenantShare] = []
        self.queue_timeouts: list[float | None] = []
        self.peak = 0
        self._inputs = InputProcessor(
            InputLimits(vocab_size=VOCAB_SIZE, max_model_len=self.config.model.max_model_len or MAX_MODEL_LEN),
            self.tokenizer, self.defaults,
        )  # fmt: skip

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[RequestOutput]:
        assert request_id not in self.live, "ids are unique"
        prepared = self._inputs.prepare(prompt, sampling_params, options)
        ids = prepared.prompt_token_ids.tolist()
        self.prompts.append(ids)
        self.salts.append(options.cache_salt)
        self.priorities.append(options.priority)
        self.tenants.append(options.tenant)
        self.queue_timeouts.append(options.queue_timeout)
        self.live[request_id] = sampling_params
        self.peak = max(self.peak, len(self.live))
        stats = RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic(), scheduled_ts=time.monotonic())
        stats.drafts = self.drafts
        answers = [_Answer(self, ids, prepared.params, index) for index in range(prepared.params.n)]
        start = time.monotonic()
        try:
            for position in itertools.count():
                await asyncio.sleep(self.interval_s)
                while self.holds and request_id not in self.aborted:
                    await asyncio.sleep(0.005)
                self._fail(position)
                if request_id in self.aborted:
                    for answer in answers:
                        answer.is_changed = answer.is_changed or answer.reason is None
                        answer.reason = answer.reason or "abort"
                else:
                    for answer in answers:
                        answer.step(position)
                        stats.num_generation_tokens += answer.is_changed
                stats.last_token_ts = time.monotonic()
                if not position:
                    stats.first_token_ts, stats.first_token_latency = stats.last_token_ts, stats.last_token_ts - start
                finished = all(answer.reason is not None for answer in answers)
                if finished:
                    stats.output_ts = time.monotonic()
                if prepared.params.output_kind is not RequestOutputKind.FINAL_ONLY or finished:
                    yield self._output(request_id, prepared, ids, answers, finished, replace(stats))
                if finished:
                    return
        finally:
            del self.live[request_id]

    def token(self, prompt: list[int], seed: int, position: int) -> int | None:
        """The token at `position` of the answer; None = it has ended."""
        return rule(prompt, seed, position)

    def step(
        self,
        num_new_tokens: int = 0,
        misses: Sequence[CacheMiss] = (),
        drafts: DraftOutcomes | None = None,
        speculation: SpeculationStats | None = None,
        **stats: Any,
    ) -> None:
        """Tell the listeners of a step with so many new tokens, these cache misses, drafts and statistics."""
        events = tuple(RequestEvent(0, EventKind.SCHEDULED, 0.0, 0, miss) for miss in misses)
        tokens = np.zeros(num_new_tokens, dtype=np.int64)
        record = EngineCoreOutputs(
            handles=tokens, new_token_ids=tokens, logprobs=None, prompt_logprobs=(), finished=(), events=events,
            stats=SchedulerStats(**stats), timestamp=time.monotonic(), drafts=drafts, speculation=speculation,
        )  # fmt: skip
        for listener in self.step_listeners:
            listener(record)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.aborted += [one for one in ids if one not in self.aborted]

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError("the engine has stopped: /secret/path 0xdeadbeef")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return not self.live or reset_running_requests

    async def live_states(self) -> list[EngineState]:
        return list(self.states)

    async def profile(self, starts: bool) -> bool:
        changes, self.is_profiled = self.is_profiled != starts, starts
        return changes

    def core_processes(self) -> list[CoreProcesses]:
        return [
            CoreProcesses(
                0, [os.getpid(), os.getppid()], {"kv_cache": 1 << 20, "huge_pages_asked": 1 << 21}, num_reports=2
            )
        ]

    async def pause_generation(self) -> None:
        self.is_paused = True

    async def resume_generation(self) -> None:
        self.is_paused = False

    def shutdown(self) -> None:
        self.errored = True

    def _fail(self, position: int) -> None:
        if position == self.fails_after:
            raise EngineGenerateError("division by zero in /usr/lib/kernel.py at 0x7f00deadbeef")
        if self.errored or position == self.dies_after:
            self.errored = True
            raise EngineDeadError("segmentation fault in /usr/lib/kernel.so at 0x7f00deadbeef")

    def _output(
        self, request_id: str, prepared: Any, ids: list[int], answers: list[_Answer], finished: bool, stats: Any
    ) -> RequestOutput:
        is_delta = prepared.params.output_kind is RequestOutputKind.DELTA
        shown = [answer for answer in answers if answer.is_changed or not is_delta]
        prompt_logprobs = None
        if prepared.params.prompt_logprobs is not None:
            lines = [self.line(one, prepared.params.prompt_logprobs) for one in ids[1:]]
            prompt_logprobs = [None, *lines]
        return RequestOutput(
            request_id, prepared.prompt, ids, [answer.take(is_delta) for answer in shown], finished,
            prompt_logprobs=prompt_logprobs, num_cached_tokens=len(ids) // 2, metrics=stats,
        )  # fmt: skip

    def line(self, token_id: int, count: int) -> dict[int, Logprob]:
        """The token with log-probability -1, then `count` others, the last impossible."""
        line = {token_id: Logprob(-1.0, 2, self.tokenizer.token_text(token_id))}
        for number in range(count):
            other = (token_id + 1 + number) % VOCAB_SIZE
            value = -float("inf") if number == 3 else -0.5 * (number + 1) if number == 0 else -1.5 - number
            line[other] = Logprob(value, 1 if number == 0 else 2 + number, self.tokenizer.token_text(other))
        return line


@dataclass
class WritingEngine(ScriptedEngine):
    """Writes texts.

    Attributes:
        write: the answer to (text of the prompt, seed); called once for each answer.
    """

    write: Callable[[str, int], str] = lambda prompt, seed: "Hello."

    def __post_init__(self) -> None:
        super().__post_init__()
        self._texts: dict[tuple[int, int], list[int]] = {}

    def token(self, prompt: list[int], seed: int, position: int) -> int | None:
        key = (id(prompt), seed)  # `prompts` keeps them, so no two have one id
        if position == 0:
            text = self.write(self.tokenizer.decode(prompt, skip_special_tokens=False), seed)
            self._texts[key] = self.tokenizer.encode(text, add_special_tokens=False)
        ids = self._texts[key]
        return ids[position] if position < len(ids) else None


class _Answer:
    def __init__(self, engine: ScriptedEngine, prompt: list[int], params: SamplingParams, index: int) -> None:
        self._engine, self._prompt, self._params, self._index = engine, prompt, params, index
        self._seed = (params.seed or 0) + index
        self._ids: list[int] = []
        self._text = ""
        self._num_taken = self._num_chars = 0
        self.reason: str | None = None
        self.stop_reason: str | int | None = None
        self.is_changed = False

    def step(self, position: int) -> None:
        self.is_changed = self.reason is None
        if self.reason is not None:
            return
        token_id = self._engine.token(self._prompt, self._seed, position)
        if token_id is None:
            self.reason = "stop"
            return
        self._ids.append(token_id)
        tokenizer = self._engine.tokenizer
        self._text = "" if tokenizer is None else tokenizer.decode(self._ids)
        for stop in self._params.stop_strings:
            if stop in self._text:
                self._text = self._text[: self._text.index(stop)]
                self.reason, self.stop_reason = "stop", stop
                return
        if position + 1 == self._params.max_tokens:
            self.reason = "length"

    def take(self, is_delta: bool) -> CompletionOutput:
        first, begin = (self._num_taken, self._num_chars) if is_delta else (0, 0)
        self._num_taken, self._num_chars = len(self._ids), len(self._text)
        lines = None
        if self._params.logprobs is not None:
            lines = [self._engine.line(one, self._params.logprobs) for one in self._ids[first:]]
        return CompletionOutput(
            self._index, self._text[begin:], self._ids[first:], None, lines, self.reason, self.stop_reason
        )


class SteppedEngine(Pumped):
    """An `LLMEngine` that a thread steps while requests run."""

    def __init__(self, engine: LLMEngine) -> None:
        self.config, self.tokenizer = engine.config, engine.tokenizer
        self.chat_template, self.defaults = engine.chat_template, engine.defaults
        self.step_listeners: list[StepListener] = []
        self.errored = self.is_paused = False
        self.num_restarts = self.num_resumed = 0
        self._engine = engine
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ends = False
        self._queues: dict[str, Callable[[RequestOutput], Any]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[RequestOutput]:
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._engine.submit(request_id, prompt, sampling_params, options)
            self._queues[request_id] = lambda output: loop.call_soon_threadsafe(queue.put_nowait, output)
        self._wake.set()
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        finally:
            with self._lock:
                self._queues.pop(request_id, None)
                self._engine.discard_requests([request_id])

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        with self._lock:
            self._engine.abort_request(request_ids)
        self._wake.set()

    async def check_health(self) -> None:
        return None

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        with self._lock:
            return self._engine.reset_prefix_cache(reset_running_requests)

    async def live_states(self) -> list[EngineState]:
        with self._lock:
            state = self._engine._client._core.live_state()
        return [] if state is None else [state]

    async def pause_generation(self) -> None:
        self.is_paused = True

    async def resume_generation(self) -> None:
        self.is_paused = False

    def shutdown(self) -> None:
        self._ends = True
        self._wake.set()
        self._thread.join()
        self._engine.shutdown()

    def _run(self) -> None:
        while not self._ends:
            with self._lock:
                outputs = self._engine.step() if self._engine.has_unfinished_requests() else None
                for output in outputs or ():
                    if output.request_id in self._queues:
                        self._queues[output.request_id](output)
            if outputs is None:
                self._wake.wait(0.05)
                self._wake.clear()
