"""StateFeed: the state of the server for all who look, collected at most every `INTERVAL_S`, and never otherwise.

Made with the routes below /debug. Owns the points of the series, the parts of prompts that were seen being computed,
and how many look.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from quire.core.live_state import ChunkRecord, EngineState, ProcessState
from quire.engine.weight_controls import WeightControls
from quire.errors import EngineDeadError
from quire.metrics.family_sums import SummedTotals
from quire.server.api.openai.info_routes import speculation_info
from quire.server.chat.state import ServerParts, ServerState
from quire.server.debug.series import SeriesLog
from quire.server.debug.state import DebugState, ModelLive, TenantUse
from quire.utils.process import read_own_usage
from quire.version import __version__

INTERVAL_S = 0.5
PATIENCE_S = 2.0
"""For which an engine core may compute a step before the server is shown without its state."""
MAX_TRACED_HANDLES = 1024
MAX_CHUNKS_OF_ONE = 512
MAX_SHOWN_TENANTS = 256


class StateFeed:
    """Collects states.

    Args:
        sources: the models that are served now.
        parts: of the server.
        is_draining: whether the server is about to end.

    Attributes:
        num_viewers: event streams that are open.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[ServerState]],
        parts: ServerParts,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.is_draining = is_draining
        self._sources = sources
        self._parts = parts
        self._started_s = time.monotonic()
        self._looked_s = float("-inf")
        self._models: list[tuple[ModelLive, SeriesLog]] = []
        self._logs: dict[str, SeriesLog] = {}
        self._asked: dict[str, asyncio.Task[list[EngineState]]] = {}
        self._chunks: OrderedDict[tuple[str, int], deque[ChunkRecord]] = OrderedDict()
        self._last_steps: dict[tuple[str, int], tuple[int, int]] = {}  # (process, step) of a core
        self._looking: asyncio.Task[None] | None = None
        self.num_viewers = 0

    async def state(self, since: float = 0.0) -> DebugState:
        """The state of now, or of less than `INTERVAL_S` ago.

        Args:
            since: Unix time of the last point of the series that is known already.
        """
        if self._looking is None and time.monotonic() - self._looked_s >= INTERVAL_S:
            self._looking = asyncio.ensure_future(self._look())
        if self._looking is not None:
            await asyncio.shield(self._looking)
        usage = read_own_usage()
        return DebugState(
            version=__version__, time=time.time(), time_s=time.monotonic(), interval_s=INTERVAL_S,
            uptime_s=time.monotonic() - self._started_s, num_viewers=self.num_viewers,
            server=ProcessState(usage.pid, usage.rss_bytes, usage.cpu_s, usage.num_threads),
            tenants=self._tenants(),
            models=[msgspec.structs.replace(live, series=log.since(since)) for live, log in self._models],
        )  # fmt: skip

    def chunks_of(self, model: str, handle: int) -> Sequence[ChunkRecord]:
        """Parts of a prompt that were computed while someone looked."""
        return self._chunks.get((model, handle), ())

    async def _look(self) -> None:
        try:
            self._models = [await self._model(state) for state in self._sources()]
            self._looked_s = time.monotonic()
        finally:
            self._looking = None

    async def _model(self, state: ServerState) -> tuple[ModelLive, SeriesLog]:
        name, engine = state.model_names[0], state.engine
        log = self._logs.get(name)
        peers = self._parts.peers
        if log is None or (peers is None and log.metrics is not state.metrics):
            log = self._logs[name] = SeriesLog(state.metrics if peers is None else SummedTotals(), time.time)
        if peers is not None and isinstance(log.metrics, SummedTotals):
            log.metrics.update(await peers.families(state.metrics.all_series()))
        log.look()
        engines, problem = await self._engines(state, name)
        weights = engine if isinstance(engine, WeightControls) else None
        num_held = 0 if weights is None else weights.num_held
        if not problem and weights is not None and (weights.sleep_state.tags or engine.is_paused):
            what = "sleeps" if weights.sleep_state.tags else "is paused"
            problem = f"the engine {what}; sequences that wait for it: {num_held}"
        live = ModelLive(
            names=list(state.model_names), num_answers=state.admission.num_answers, is_draining=state.is_draining,
            is_paused=engine.is_paused, restarts=engine.num_restarts, resumed=engine.num_resumed,
            predicted_wait_s=state.admission.estimated_wait_s(), problem=problem,
            speculation=speculation_info(engine.config, state.metrics.drafts), engines=engines,
            processes=list(await state.look_at_processes()), series=log.since(0.0),
            sleep_state="awake" if weights is None else weights.sleep_state.name, num_held=num_held,
            weight_versions={} if weights is None else {str(k): v for k, v in weights.weight_versions.items()},
        )  # fmt: skip
        return live, log

    async def _engines(self, state: ServerState, name: str) -> tuple[list[EngineState], str]:
        """The states of its cores; none, and why, where these do not answer. A core is asked once at a time."""
        asked = self._asked.pop(name, None) or asyncio.ensure_future(state.engine.live_states())
        done, _ = await asyncio.wait({asked}, timeout=PATIENCE_S)
        if not done:
            self._asked[name] = asked
            return [], f"the engine core has not answered for {PATIENCE_S:g} s: it runs a long step, or restarts"
        try:
            found = asked.result()
        except EngineDeadError as error:
            return [], error.message
        for one in found:
            self._note_chunks(name, one)
        return [_with_waits(one, state) for one in found], ""

    def _note_chunks(self, name: str, engine: EngineState) -> None:
        """Keep what was not seen before, for the timelines of requests."""
        process, seen = self._last_steps.get((name, engine.index), (0, -1))
        if process != engine.process.pid:
            seen = -1  # another core, which counts its steps anew
        for chunk in engine.chunks:
            if chunk.step <= seen:
                continue
            kept = self._chunks.setdefault((name, chunk.handle), deque(maxlen=MAX_CHUNKS_OF_ONE))
            kept.append(chunk)
            if len(self._chunks) > MAX_TRACED_HANDLES:
                self._chunks.popitem(last=False)
        if engine.chunks:
            self._last_steps[name, engine.index] = engine.process.pid, engine.chunks[-1].step

    def _tenants(self) -> list[TenantUse]:
        tenants = sorted(self._parts.tenants.all(), key=lambda one: (-one.num_answers, one.name))
        return [
            TenantUse(one.name, one.is_operator, one.share.weight, one.num_requests, one.num_answers)
            for one in tenants[:MAX_SHOWN_TENANTS]
        ]


def _with_waits(engine: EngineState, state: ServerState) -> EngineState:
    """With the predicted wait of each request in the queue, behind those before it."""
    waits = state.admission.waits_s([(1.0, float(one.prompt_tokens), one.max_tokens) for one in engine.queue])
    queue = [
        one if wait is None else msgspec.structs.replace(one, predicted_wait_s=wait)
        for one, wait in zip(engine.queue, waits, strict=True)
    ]
    return msgspec.structs.replace(engine, queue=queue)
