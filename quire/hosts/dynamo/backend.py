"""QuireWorker: a worker of NVIDIA Dynamo, on its contract for engines (`LLMEngine` of ai-dynamo 1.6).

Run by `quire dynamo`; imports `dynamo`, which this package does not need otherwise. Owns the engine, which replaces a
core that dies by itself; what Dynamo's front end migrates are requests of a worker that is gone as a whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.common.backend import run as dynamo_run
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from quire.config import QuireConfig
from quire.config.dynamo import DynamoConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError, QuireClientError, QuireError
from quire.hosts.dynamo.chunks import ChunkMaker
from quire.hosts.dynamo.requests import prefill_params, read_request, request_options, sampling_params
from quire.logger import get_logger
from quire.metrics.engine_metrics import EngineMetrics
from quire.models.hub import resolve_model_path

RANK = 0

logger = get_logger(__name__)


class QuireWorker(LLMEngine):
    """One engine in a Dynamo deployment.

    Args:
        config: of the engine.
        place: of the worker.
        model_path: directory of the model, which Dynamo reads the tokenizer from.
    """

    def __init__(self, config: QuireConfig, place: DynamoConfig, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._mode = DisaggregationMode(place.disaggregation_mode)
        self._routes = place.enable_kv_routing
        self._engine: AsyncLLM | None = None
        self._metrics: EngineMetrics | None = None
        self._snapshots: Any = None
        self._num_queries = self._num_hits = 0
        self._is_ending = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[QuireWorker, WorkerConfig]:
        """A worker comes from `quire dynamo`, which reads the flags."""
        raise NotImplementedError("start a worker with: quire dynamo MODEL")

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the engine; ready for requests when this returns."""
        start = AsyncLLM.begin(self._config)
        engine = self._engine = await asyncio.to_thread(AsyncLLM.from_start, start)
        engine.step_listeners.append(self._on_step)
        config = engine.config
        self._metrics = EngineMetrics(config, self._served_name)
        self._metrics.count_restarts(lambda: engine.num_restarts, lambda: engine.num_resumed)
        engine.step_listeners.append(self._metrics.record_step)
        return EngineConfig(
            model=self._model_path,
            served_model_name=self._served_name,
            llm=LlmRegistration(
                context_length=config.max_model_len,
                kv_cache_block_size=config.cache.block_size,
                total_kv_blocks=self._num_blocks,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Chunks of one request as its tokens come."""
        engine = self._engine
        if engine is None:
            raise EngineShutdown("the engine is not running")
        is_prefill = self._mode is DisaggregationMode.PREFILL and not is_probe(request)
        try:
            read = read_request(request)
            params = prefill_params() if is_prefill else sampling_params(read, engine.defaults.sampling)
            self._check_prefilled(read.prefill_result is not None or is_probe(request))
            options = request_options(read, has_priorities=self._has_priorities)
            stream = await engine.open_stream({"prompt_token_ids": read.token_ids}, params, context.id(), options)
        except QuireError as error:
            raise self._as_dynamo(error) from None
        maker = ChunkMaker(is_prefill=is_prefill)
        try:
            is_finished = False
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                for chunk in maker.chunks(output):
                    yield chunk
                if is_finished:
                    self._count(output, params)
        except QuireError as error:
            raise self._as_dynamo(error) from None
        finally:
            stream.close()

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone; its stream ends with what it has."""
        if self._engine is not None:
            await self._engine.abort(context.id())

    async def cleanup(self) -> None:
        """End the engine; harmless when repeated, or when it did not start."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One token after one token."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1)
        return payload

    async def kv_event_sources(self) -> list[Any]:
        """The engine's own publisher of prefix-cache events."""
        events = self._config.observability.kv_events
        if not events.enable_kv_cache_events or events.publisher != "zmq":
            return []
        return [ZmqSource(endpoint=events.endpoint.replace("*", "127.0.0.1"), topic=events.topic, dp_rank=RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """This worker has one rank."""
        return [RANK] if self._routes else []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Where the load is published."""
        self._snapshots = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Show the engine's metrics with those of the worker."""
        if self._metrics is not None:
            register_engine_registry(metrics, self._metrics.registry)

    # --- within ---

    @property
    def _served_name(self) -> str:
        name = self._config.model.served_model_name
        return name or self._config.model.model

    @property
    def _num_blocks(self) -> int:
        assert self._engine is not None, "it has started"
        return max(0, (self._engine.config.cache.num_blocks or 0) - 1)  # without the null block

    @property
    def _has_priorities(self) -> bool:
        return self._config.scheduler.scheduling_policy == "priority"

    def _check_prefilled(self, is_prefilled: bool) -> None:
        """A decode worker computes no prompts: its front end is to send them through a prefill worker first."""
        if self._mode is DisaggregationMode.DECODE and not is_prefilled:
            raise InvalidArgument("a decode worker got a request without prefill_result")

    def _on_step(self, step: EngineCoreOutputs) -> None:
        """Publish the load after a step."""
        stats = step.stats
        self._num_queries += stats.prefix_cache_queries
        self._num_hits += stats.prefix_cache_hits
        if self._snapshots is None:
            return
        total = self._num_blocks
        self._snapshots.publish(
            RANK,
            ComponentSnapshot(
                kv_used_blocks=round(stats.kv_cache_usage * total),
                kv_total_blocks=total,
                gpu_cache_usage=stats.kv_cache_usage,
                dp_rank=RANK,
                kv_cache_hit_rate=self._num_hits / self._num_queries if self._num_queries else None,
            ),
        )

    def _count(self, output: RequestOutput, params: SamplingParams) -> None:
        if self._metrics is None:
            return
        for one in output.outputs:
            self._metrics.record_finish(one.finish_reason or "stop")
        num_tokens = output.metrics.num_generation_tokens
        self._metrics.record_request(
            output.metrics, params, len(output.prompt_token_ids), output.num_cached_tokens or 0, num_tokens
        )

    def _as_dynamo(self, error: QuireError) -> Exception:
        """What Dynamo's front end understands: a caller's mistake, an engine that is gone, or a failed request."""
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        if isinstance(error, QuireClientError):
            return InvalidArgument(message)  # type: ignore[no-any-return]
        if isinstance(error, EngineDeadError):
            if self._engine is not None and not self._is_ending:
                logger.error("the engine has stopped for good: this worker ends")
                self._is_ending = True
                os.kill(os.getpid(), signal.SIGTERM)
            return EngineShutdown(message)  # type: ignore[no-any-return]
        return Unknown(message)  # type: ignore[no-any-return]


def run(config: QuireConfig, place: DynamoConfig) -> None:
    """Serve as a worker until a signal ends it.

    Raises:
        QuireError: the model is not there.
    """
    path = str(resolve_model_path(config.model.model, config.model.revision, config.load.download_dir))

    async def make(argv: list[str] | None) -> tuple[QuireWorker, WorkerConfig]:
        return QuireWorker(config, place, path), worker_config(config, place, path)

    dynamo_run.run(QuireWorker, [], make)


def worker_config(config: QuireConfig, place: DynamoConfig, model_path: str) -> WorkerConfig:
    """Where a worker is registered; what `place` leaves open, Dynamo's environment variables say."""
    mode = DisaggregationMode(place.disaggregation_mode)
    is_own_place = mode is DisaggregationMode.PREFILL and place.component == "backend"
    return WorkerConfig(
        namespace=place.namespace or os.environ.get("DYN_NAMESPACE", "dynamo"),
        component="prefill" if is_own_place else place.component,
        endpoint=place.endpoint,
        model_name=model_path,
        served_model_name=config.model.served_model_name or config.model.model,
        endpoint_types=place.endpoint_types,
        discovery_backend=place.discovery_backend or os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
        request_plane=place.request_plane or os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        response_plane=place.response_plane or os.environ.get("DYN_RESPONSE_PLANE", "tcp"),
        event_plane=place.event_plane or os.environ.get("DYN_EVENT_PLANE"),
        tool_call_parser=place.dyn_tool_call_parser,
        reasoning_parser=place.dyn_reasoning_parser,
        enable_kv_routing=place.enable_kv_routing,
        disaggregation_mode=mode,
    )
