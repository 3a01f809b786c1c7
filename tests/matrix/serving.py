"""Servers of the matrix, made when they are needed and shared by all cells: an engine for each set of settings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.config.build import build_config
from quire.core.sampling_params import SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.models.hub import resolve_model_path
from tests.compile_pools import shared_compile_pools
from tests.matrix.answers import Response, response_of
from tests.matrix.features import FEATURES, PARSERS, Feature
from tests.matrix.script import Script
from tests.robustness.drafting_methods import METHODS, ORACLE, Drafters, Target, leaf_texts, shipping_heads
from tests.robustness.http_streams import Exchange, ask
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer

CHATS = "/v1/chat/completions"
PLAIN = "plain"
SUPERVISED = "supervised"
COMMON: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 64, "block_size": 16, "num_gpu_blocks_override": 512,
}  # fmt: skip
SMALL_POOL = {"num_gpu_blocks_override": 48, "enable_prefix_caching": False, "scheduler_reserve_full_isl": False}
URGENT = {"scheduling_policy": "priority", "max_num_seqs": len(FEATURES)}
ENGINES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "chunks": {"max_num_batched_tokens": 33, "max_num_seqs": 32, "enable_prefix_caching": False},
    "pool": SMALL_POOL,
    "recompute": {**URGENT, "preemption_mode": "recompute"},
    "swap": {**URGENT, "preemption_mode": "swap", "swap_space": 0.05},
    "fair": {**SMALL_POOL, "scheduling_policy": "fair"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    SUPERVISED: {},
}
DRAFTING = {f"drafts_{name.replace(', else ', '_else_')}": name for name in METHODS if name != ORACLE}
"""Engine -> the method by which it drafts, as often as it may."""
NUM_COPIES = {"pool": 2, "fair": 2}
MAX_KILLS = MAX_TRIES = 8
MAX_WAITS = 30_000  # of a millisecond each
RUN_S, LOOK_S = 0.004, 0.02
USAGE = {"include_usage": True}


class Counted:
    """Counts what the control plane of an engine does, and interferes once.

    Attributes:
        num_preemptions, num_swaps: preempted requests, and those of them that were swapped.
        gathers: so many requests must have come before the next step, which waits for one that was refused for a while.
        interrupts_at: after three steps in which so many requests decode, as many come that are more urgent; 0 = never.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.num_preemptions = self.num_swaps = self.gathers = self.interrupts_at = 0
        self._engine = engine
        self._step = engine.step
        self._num_steps = self._num_waits = 0
        self._numbers = itertools.count()
        engine.step = self._counted_step  # type: ignore[method-assign]

    def _counted_step(self) -> Any:
        if self._engine.get_num_unfinished_requests() < self.gathers and self._num_waits < MAX_WAITS:
            self._num_waits += 1
            time.sleep(0.001)
            return []
        self._num_steps *= self.gathers == 0
        self.gathers = self._num_waits = 0
        outputs = self._step()
        stats = self._engine.last_stats
        self.num_preemptions += stats.num_preemptions
        self.num_swaps += stats.num_swap_preemptions
        self._num_steps += 0 < self.interrupts_at == stats.num_running == stats.num_scheduled_tokens
        if self._num_steps == 3:
            urgent = SamplingParams(temperature=0, max_tokens=2 * len(FEATURES), ignore_eos=True)
            for _ in range(self.interrupts_at):
                self._engine.add_request(f"urgent-{next(self._numbers)}", "Now", urgent, priority=-1)
            self.interrupts_at = self._num_steps = 0
        return outputs


class OneLoop:
    """An event loop in a thread, for servers that share an engine."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LoopServer(RunningServer):
    """A server on a loop that runs already."""

    def __init__(self, loop: OneLoop, engine: Any, **settings: Any) -> None:
        self._loop = loop
        super().__init__(engine, **settings)

    def _run(self) -> None:
        self._loop.run(self.server.serve(sockets=[self.listener]))


@dataclass
class Crowd:
    """What requests that ran at once were answered.

    Attributes:
        responses: of each feature, those of its copies.
        num_preemptions, num_swaps: while they ran.
        has_drafted: some drafts stood, and some did not.
    """

    responses: dict[str, list[Response]]
    num_preemptions: int
    num_swaps: int
    has_drafted: bool


class Servers:
    """Engines and servers by the names of their settings.

    Args:
        model: what they serve, under the name of the embedded one.
    """

    def __init__(self, model: str = "leaf") -> None:
        self._model = {"model": model, "served_model_names": ("leaf",)}
        self._loop = OneLoop()
        self._directory = tempfile.TemporaryDirectory()  # models that draft
        self._engines: dict[str, Any] = {}
        self._counts: dict[str, Counted] = {}
        self._servers: dict[tuple[str, str], LoopServer] = {}
        self._crowds: dict[str, Crowd] = {}
        self._resumed: dict[str, Response] = {}
        self._pools = contextlib.ExitStack()
        self._pools.enter_context(shared_compile_pools())

    def close(self) -> None:
        for server in self._servers.values():
            server.server.should_exit = True  # all at once: each takes a moment
        for server in self._servers.values():
            server.__exit__()
        for engine in self._engines.values():
            engine.shutdown()
        self._loop.close()
        self._directory.cleanup()
        self._pools.close()

    def port(self, parsers: str, engine: str = PLAIN) -> int:
        """Where the server of these settings listens."""
        if (engine, parsers) not in self._servers:
            server = LoopServer(self._loop, self._engine(engine), enable_per_request_metrics=True, **PARSERS[parsers])
            self._servers[engine, parsers] = server.__enter__()  # type: ignore[assignment]
        return self._servers[engine, parsers].port

    def exchange(self, feature: Feature, path: str, body: dict[str, Any], engine: str = PLAIN) -> Exchange:
        """One request to any API, and what came back."""
        return asyncio.run(ask(self.port(feature.parsers, engine), path, body))

    def exchanges(self, feature: Feature, path: str, bodies: Sequence[dict[str, Any]]) -> list[Exchange]:
        """Several requests at once."""

        async def ask_all() -> list[Exchange]:
            return await asyncio.gather(*(ask(self.port(feature.parsers), path, body) for body in bodies))

        return asyncio.run(ask_all())

    def ask(self, feature: Feature, body: dict[str, Any], *, engine: str = PLAIN) -> Response:
        """The response to one chat."""
        return response_of(self.exchange(feature, CHATS, body, engine))

    def crowd(self, engine: str) -> Crowd:
        """The responses to all features at once."""
        if engine not in self._crowds:
            asyncio.run(self._ask_all(engine, FEATURES, max_tokens=1))  # now their grammars are there
            counts = self._counts[engine]
            is_urgent = engine not in DRAFTING and ENGINES[engine].keys() >= URGENT.keys()
            names = [*FEATURES] * NUM_COPIES.get(engine, 1)
            for _ in range(MAX_TRIES):
                counts.gathers = len(names)
                counts.interrupts_at = len(FEATURES) if is_urgent else 0
                fields = {"stream": True, "stream_options": USAGE} if engine in DRAFTING else {}
                exchanges = asyncio.run(self._ask_all(engine, names, **fields))
                responses: dict[str, list[Response]] = {name: [] for name in FEATURES}
                for name, exchange in zip(names, exchanges, strict=True):
                    responses[name].append(response_of(exchange))
                has_drafted = engine in DRAFTING and _has_drafted(responses)
                if is_urgent and not all(one.metrics["preemptions"] for (one,) in responses.values()):
                    continue
                if has_drafted or engine not in DRAFTING:  # some draft from answers before
                    break
            self._crowds[engine] = Crowd(responses, counts.num_preemptions, counts.num_swaps, has_drafted)
        return self._crowds[engine]

    def resumed(self, name: str) -> Response:
        """The stream of a feature whose engine core was killed under it; all features are tried at once."""
        for _ in range(MAX_KILLS):
            if name in self._resumed:
                break
            asyncio.run(self._kill_under([one for one in FEATURES if one not in self._resumed]))
        return self._resumed[name]

    @cached_property
    def _drafters(self) -> Drafters:
        target = Target(Path(resolve_model_path("leaf", None, None)), {"model": "leaf"})
        return Drafters(target, Path(self._directory.name), leaf_texts())

    def _engine(self, name: str) -> Any:
        if name not in self._engines:
            more = self._drafters.settings(DRAFTING[name]) if name in DRAFTING else ENGINES[name]
            config = build_config(**{**COMMON, **self._model, **more})
            if name == SUPERVISED:
                self._engines[name] = AsyncLLM.from_config(config, logits_processors=["tests.matrix.script:Script"])
            else:
                with shipping_heads():
                    engine = LLMEngine.from_config(config, logits_processors=[Script])
                self._counts[name] = Counted(engine)
                self._engines[name] = SteppedEngine(engine)
        return self._engines[name]

    async def _ask_all(self, engine: str, names: Iterable[str], **fields: Any) -> list[Exchange]:
        ports = {parsers: self.port(parsers, engine) for parsers in PARSERS}
        asked = [ask(ports[FEATURES[name].parsers], CHATS, FEATURES[name].body(**fields)) for name in names]
        return list(await asyncio.gather(*asked))

    async def _kill_under(self, names: Sequence[str]) -> None:
        """Stream the features; kill the core when every one of them has begun."""
        await self._ask_all(SUPERVISED, names, max_tokens=1)  # now their grammars are there
        exchanges = {name: Exchange() for name in names}
        fields = {"stream": True, "stream_options": USAGE}
        streams = [
            asyncio.ensure_future(
                ask(self.port(FEATURES[name].parsers, SUPERVISED), CHATS, FEATURES[name].body(**fields), one)
            )
            for name, one in exchanges.items()
        ]
        pid = self._engine(SUPERVISED).core_pid
        while True:  # in slices: what the core has sent is read while it stands still
            await asyncio.sleep(RUN_S)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(LOOK_S)
            if all(len(one.events) > 1 or one.is_complete for one in exchanges.values()):
                break
            os.kill(pid, signal.SIGCONT)
        running = [name for name, one in exchanges.items() if not one.is_complete]
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*streams)
        for name in running:
            response = response_of(exchanges[name])
            if response.metrics["restarts"]:
                self._resumed[name] = response


def _has_drafted(responses: dict[str, list[Response]]) -> bool:
    """Whether some drafts stood, and some did not."""
    metrics = [one.metrics for copies in responses.values() for one in copies]
    return 0 < sum(one["accepted_tokens"] for one in metrics) < sum(one["drafted_tokens"] for one in metrics)
