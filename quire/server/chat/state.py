"""ServerState: what the routes of one model share. ServerParts: what all models of one server share.

Made by `server.app.make_app`, or for each load of a model by `server.switching`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.config.server import ServerConfig
from quire.core.process_stats import RankUsage
from quire.engine.data_parallel.totals import TotalStats
from quire.engine.process_watch import ProcessWatch
from quire.engine.protocol import EngineClient, Observable, Scalable
from quire.engine.weight_controls import WeightControls
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.replica_metrics import ReplicaMetrics
from quire.metrics.server_metrics import ServerMetrics
from quire.server.chat.cache_view import CacheView
from quire.server.chat.parsing import Parsing
from quire.server.chat.prompts import PromptReader
from quire.server.chat.protocol.generation import REQUEST_ID
from quire.server.chat.reading import BodyReader
from quire.server.chat.shared_prefixes import SharedPrefixes, read_shared_prefixes
from quire.server.http.admission import Admission
from quire.server.http.body_budget import BodyBudget
from quire.server.http.errors import NOT_FOUND, UNAVAILABLE, ApiError
from quire.server.http.keep_alive import KeepAlive
from quire.server.http.keys import ApiKeys
from quire.server.http.limit_makers import OWN_LIMITS, LimitMakers
from quire.server.http.peers import Peers
from quire.server.http.places import Places
from quire.server.http.prompt_workers import PromptWorkers
from quire.server.http.recent_requests import RecentRequests
from quire.server.http.tenants import Tenants
from quire.server.http.tracing import Tracing, make_tracing
from quire.server.usage.tokens import TokenAccounts, make_accounts
from quire.utils.checks import shown
from quire.utils.phases import Phases
from quire.version import __version__


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What does not depend on a model.

    Attributes:
        tracing: None = no traces.
        workers: threads for prompts, shared by the tenants.
        body_budget: of the bodies of all requests.
        keep_alive: writes to silent streams.
        accounts: of the tokens that tenants use.
        recent: the latest requests, for the page; None = it is off.
        limits: makes what counts.
        peers: the other front ends on this port; None = there are none.
        created: Unix time of the start.
    """

    config: ServerConfig
    metrics: ServerMetrics
    tenants: Tenants
    tracing: Tracing | None
    workers: PromptWorkers
    body_budget: BodyBudget
    keep_alive: KeepAlive
    accounts: TokenAccounts
    recent: RecentRequests | None = None
    limits: LimitMakers = OWN_LIMITS
    peers: Peers | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    async def close(self) -> None:
        """End their threads."""
        self.keep_alive.close()
        self.workers.close()
        await asyncio.to_thread(self.accounts.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


@dataclass(slots=True)
class ServerState:
    """Parts of a running server, for one model.

    Attributes:
        parts: those that its other models have, too.
        model_names: the first is reported, each may be asked for.
        tracing: None = no traces.
        workers: threads for prompts, shared by the tenants.
        places: of prompts of requests with many.
        parsing: how calls and thinking are read out of answers.
        keep_alive: writes to silent streams.
        processes: of the engine's cores; None = they are not processes of this machine.
        running: engine's names of requests that run.
    """

    parts: ServerParts
    engine: EngineClient
    config: ServerConfig
    model_names: list[str]
    metrics: EngineMetrics
    admission: Admission
    tenants: Tenants
    cache_view: CacheView
    shared_prefixes: SharedPrefixes
    tracing: Tracing | None
    workers: PromptWorkers
    places: Places
    prompts: PromptReader
    bodies: BodyReader
    parsing: Parsing
    keep_alive: KeepAlive
    processes: ProcessWatch | None = None
    running: set[str] = field(default_factory=set)
    fingerprint: str = ""
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def engine_id(self, public_id: str) -> str:
        """A name for the engine: the client's, made unique."""
        return f"{public_id}-{next(self._serial)}"

    @property
    def errored(self) -> bool:
        """True once the server is of no further use."""
        return self.engine.errored

    @property
    def is_draining(self) -> bool:
        """True when no new work is taken, as the server is about to end."""
        return self.admission.is_draining

    def begin_drain(self) -> None:
        """Take no new work."""
        self.admission.is_draining = True

    @property
    def num_answers(self) -> int:
        """Answers that were admitted and have not ended."""
        return self.admission.num_own_answers

    @property
    def num_running(self) -> int:
        """Requests in the engine."""
        return len(self.running)

    async def abort_running(self) -> None:
        """Have every request in the engine end with what it has."""
        await self.engine.abort(list(self.running))

    def show_start(self, server: Phases, core: Phases) -> None:
        """Let /metrics show startup times."""
        self.metrics.show_start("server", server)
        self.metrics.show_start("engine_core", core)

    async def look_at_processes(self) -> Sequence[RankUsage]:
        """What the processes of engine cores take now; /metrics shows what was found last."""
        return () if self.processes is None else await self.processes.look()

    def refuse_new_work(self) -> None:
        """Raise `ApiError` when the server takes no new work."""
        self.admission.refuse_when_draining()
        if self.engine.is_paused and self.engine.config.supervision.sleeping_requests == "reject":
            raise ApiError(UNAVAILABLE, "the server is paused", retry_after_s=5, reason="paused")

    def check_model(self, model: str | None) -> str:
        """The name to report.

        Raises:
            ApiError: no such model.
        """
        if model is None or model == "" or model in self.model_names:
            return model or self.model_names[0]
        raise ApiError(
            NOT_FOUND,
            f"the model {shown(model)} does not exist; this server has {', '.join(self.model_names)}",
            param="model",
        )


def make_parts(
    config: ServerConfig, keys: ApiKeys, limits: LimitMakers = OWN_LIMITS, peers: Peers | None = None
) -> ServerParts:
    """The parts of a server without a model, for the tenants of `keys`; `limits` and `peers` as the attributes."""
    tenants, metrics = Tenants(keys, make=limits.tenant), ServerMetrics()
    return ServerParts(
        config=config,
        metrics=metrics,
        tenants=tenants,
        tracing=make_tracing(config.tracing.otlp_traces_endpoint, metrics.record_dropped_traces),
        workers=PromptWorkers(),
        body_budget=limits.body_budget(config.limits.max_bodies_bytes, lambda: tenants.has_several),
        keep_alive=KeepAlive(config.api.sse_keep_alive_interval),
        accounts=make_accounts(config.usage, metrics),
        recent=None if config.http.disable_debug else RecentRequests(),
        limits=limits,
        peers=peers,
    )


def make_state(
    engine: EngineClient,
    config: ServerConfig,
    keys: ApiKeys,
    limits: LimitMakers = OWN_LIMITS,
    peers: Peers | None = None,
) -> ServerState:
    """The parts of a server around `engine`; the rest as `make_parts`."""
    return make_model_state(engine, make_parts(config, keys, limits, peers))


def make_model_state(
    engine: EngineClient, parts: ServerParts, config: ServerConfig | None = None, metrics: EngineMetrics | None = None
) -> ServerState:
    """The parts that serve one model.

    Args:
        config: the server's, for this model; None = as `parts` have it.
        metrics: of an earlier engine with this model; None = there was none.
    """
    config, model = config or parts.config, engine.config.model
    names = list(model.served_model_names) or [model.model]
    num_replicas = engine.config.parallel.data_parallel_size
    make_metrics = EngineMetrics if num_replicas == 1 else ReplicaMetrics
    metrics = metrics or make_metrics(engine.config, names[0], parts.metrics)
    prompts = PromptReader(engine, config.api, parts.workers)
    max_num_seqs = num_replicas * (engine.config.scheduler.max_num_seqs or 1)
    state = ServerState(
        parts=parts,
        engine=engine,
        config=config,
        model_names=names,
        metrics=metrics,
        admission=parts.limits.admission(config.limits, max_num_seqs),
        tenants=parts.tenants,
        cache_view=CacheView(parts.tenants, config.api.isolate_tenants),
        shared_prefixes=read_shared_prefixes(config.api.shared_prefixes, engine, prompts),
        workers=parts.workers,
        places=parts.limits.places(max_num_seqs),
        prompts=prompts,
        bodies=BodyReader(config, lambda: prompts.max_chars, parts.workers, parts.body_budget),
        parsing=Parsing(config.api, engine),
        tracing=parts.tracing,
        keep_alive=parts.keep_alive,
        processes=ProcessWatch(engine.core_processes) if isinstance(engine, Observable) else None,
        fingerprint=fingerprint(engine),
    )
    if state.processes is not None and parts.peers is None:  # else the owner counts them, and the steps
        watch = state.processes
        metrics.show_processes(lambda: watch.usages, lambda: watch.cores)
    metrics.count_restarts(lambda: engine.num_restarts, lambda: engine.num_resumed)
    metrics.show_sleep(lambda: engine.sleep_state.name if isinstance(engine, WeightControls) else "awake")
    metrics.show_held(lambda: engine.num_held if isinstance(engine, WeightControls) else 0)
    if parts.peers is None:
        engine.step_listeners.append(metrics.record_step)
    elif (drafts := metrics.drafts) is not None:
        engine.step_listeners.append(lambda step: None if step.speculation is None else drafts.note(step.speculation))
    if num_replicas == 1:
        engine.step_listeners.append(lambda step: state.admission.note_step(step.stats))
    else:
        totals = TotalStats()
        if isinstance(metrics, ReplicaMetrics) and isinstance(engine, Scalable):
            metrics.count_replicas(lambda: engine.num_ready_replicas)
        engine.step_listeners.append(lambda step: state.admission.note_step(totals.note(step)))
    return state


def fingerprint(engine: EngineClient) -> str:
    """What answers with a seed depend on: the version, the model and how it is computed."""
    model = engine.config.model
    parts = (model.model, model.revision, model.dtype, model.quantization, model.seed, engine.config.device.device)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"quire-{__version__}-{digest[:8]}"


def public_id(prefix: str, request_id: str, from_body: str | None = None) -> str:
    """The id of an answer: that of its body where that is usable, else the request's."""
    return f"{prefix}{from_body if from_body is not None and REQUEST_ID.fullmatch(from_body) else request_id}"
