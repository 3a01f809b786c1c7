"""EngineMetrics: steps and requests of one engine, counted for Prometheus.

Made and fed by a server; reads records of `core` alone. Owns its registry, so that two servers in one process do
not meet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.config import QuireConfig
from quire.config.cache import CacheConfig
from quire.core.cache_info import MissReason
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.process_stats import CoreProcesses, RankUsage
from quire.core.sampling_params import SamplingParams
from quire.core.stats import RequestStateStats, SchedulerStats
from quire.metrics import buckets
from quire.metrics.draft_metrics import DraftMetrics
from quire.metrics.family_sums import HELD
from quire.metrics.gateway_metrics import GatewayMetrics
from quire.metrics.histogram import QuickHistogram
from quire.metrics.http_metrics import HttpMetrics
from quire.metrics.live_totals import PERF_TOTALS, LiveTotals, value_of
from quire.metrics.offload_metrics import OffloadMetrics
from quire.metrics.perf_metrics import PerfMetrics
from quire.metrics.process_metrics import ProcessMetrics
from quire.metrics.server_metrics import QUEUE_LIMITS, Merged, ServerMetrics, page
from quire.utils.phases import Phases
from quire.version import __version__

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition", "queue_timeout")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineMetrics:
    """Everything `/metrics` shows of an engine, and of the server around it.

    Args:
        config: resolved.
        model_name: label of every series.
        server: what the server counts, which may have other engines; None = this is its only one.
        engine_index: its number among the replicas of the model.

    Attributes:
        registry: the engine's series.
        drafts: what drafts come to; None = nothing is drafted.
        perf: what steps compute and move; None = it is not counted.
    """

    def __init__(
        self, config: QuireConfig, model_name: str, server: ServerMetrics | None = None, engine_index: int = 0
    ) -> None:
        self.registry = CollectorRegistry()
        self.server = server or ServerMetrics()
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._processes: ProcessMetrics | None = None
        self._max_len = config.model.max_model_len or 1
        self._make_step_metrics()
        self.drafts: DraftMetrics | None = None
        if config.num_draft_tokens:
            self.drafts = DraftMetrics(self._labels, config.num_draft_tokens, self.registry)
        self.perf = PerfMetrics(self._labels, self.registry) if config.observability.enable_mfu_metrics else None
        self._offload = None if config.cache.offload_field is None else OffloadMetrics(self.registry)
        self._make_request_metrics()
        self._make_info(config)

    def record_step(self, step: EngineCoreOutputs) -> None:
        """Take in one step of the engine core."""
        stats = self._last_stats = step.stats
        if stats.prefix_cache_queries:
            self._prefix_queries.inc(stats.prefix_cache_queries)
            self._prefix_hits.inc(stats.prefix_cache_hits)
        if stats.external_prefix_cache_queries:
            self._external_queries.inc(stats.external_prefix_cache_queries)
            self._external_hits.inc(stats.external_prefix_cache_hits)
        for event in step.events:
            if event.cache_miss is not None:
                self._prefix_misses[event.cache_miss.full_reason].inc()
        for name, number in () if stats.kv_connector is None else stats.kv_connector.items():
            self._connector.labels(event=name).inc(number)
        if stats.num_preemptions:
            self._preemptions.inc(stats.num_preemptions)
            num_swapped = stats.num_swap_preemptions
            self._preemptions_by_mode.labels(mode="swap").inc(num_swapped)
            self._preemptions_by_mode.labels(mode="recompute").inc(stats.num_preemptions - num_swapped)
        if stats.swapped_out_bytes or stats.swapped_in_bytes:
            self._swapped_bytes.labels(direction="out").inc(stats.swapped_out_bytes)
            self._swapped_bytes.labels(direction="in").inc(stats.swapped_in_bytes)
        if stats.kv_event_batches_dropped:
            self._kv_batches_dropped.inc(stats.kv_event_batches_dropped)
        if stats.offload is not None and self._offload is not None:
            self._offload.record(stats.offload)
        if stats.num_scheduled_tokens:
            self._step_tokens.observe(stats.num_scheduled_tokens + stats.num_first_tokens)
        if self.drafts is not None:
            if step.drafts is not None:
                self.drafts.record(step.drafts)
            if step.speculation is not None:
                self.drafts.show(step.speculation)
        if step.perf is not None and self.perf is not None:
            self.perf.record(step.perf)
        if len(step.handles):
            self._generation_tokens.inc(len(step.handles))

    @property
    def record_tokens(self) -> Callable[[float, int], None]:
        """(seconds, count): so many tokens of a request came, each so long after the one before."""
        return self._inter_token.observe

    def record_request(
        self,
        stats: RequestStateStats,
        params: SamplingParams,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        max_answer_tokens: int,
    ) -> None:
        """A request has ended.

        Args:
            stats: its timings.
            params: as the user gave them.
            num_prompt_tokens, num_cached_tokens: of its prompt; the latter were found in the cache.
            max_answer_tokens: new tokens of its longest answer.
        """
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_tokens_cached.inc(num_cached_tokens)
        self._by_source["local_compute"].inc(num_prompt_tokens - num_cached_tokens)
        self._by_source["local_cache_hit"].inc(num_cached_tokens)
        self._request_prompt.observe(num_prompt_tokens)
        self._request_computed.observe(num_prompt_tokens - num_cached_tokens)
        self._request_generation.observe(stats.num_generation_tokens)
        self._request_max_generation.observe(max_answer_tokens)
        self._request_n.observe(params.n)
        self._request_preemptions.observe(stats.num_preemptions)
        if params.max_tokens is not None:
            self._request_max_tokens.observe(params.max_tokens)
        self._e2e.observe(max(0.0, time.time() - stats.arrival_time))
        if not stats.first_token_ts:
            return
        self._ttft.observe(stats.first_token_latency)
        decode_s = stats.last_token_ts - stats.first_token_ts
        self._decode.observe(decode_s)
        if stats.num_generation_tokens > 1:
            self._per_token.observe(decode_s / (stats.num_generation_tokens - 1))
        if stats.scheduled_ts:
            self._queue.observe(max(0.0, stats.scheduled_ts - stats.queued_ts))
            self._prefill.observe(stats.first_token_ts - stats.scheduled_ts)
            self._inference.observe(stats.last_token_ts - stats.scheduled_ts)

    def record_finish(self, reason: str, engine_index: int = 0) -> None:
        """One answer of a replica ended for `reason`."""
        self._success[reason].inc()

    def record_refusal(self, reason: str, tenant: str) -> None:
        """As `ServerMetrics.record_refusal`."""
        self.server.record_refusal(reason, tenant)
        if reason in QUEUE_LIMITS:
            self._rejections.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def note_unloaded(self) -> None:
        """The engine has ended; what it counted stays."""
        self._last_stats = SchedulerStats()

    def count_restarts(self, num_restarts: Callable[[], int], num_resumed: Callable[[], int]) -> None:
        """Show how often the engine core was replaced, and how many answers were continued on another one."""
        self._restarts.set_function(num_restarts)
        self._resumed.set_function(num_resumed)

    def show_processes(
        self, usages: Callable[[], Sequence[RankUsage]], cores: Callable[[], Sequence[CoreProcesses]] = tuple
    ) -> None:
        """Show what the processes of engine cores take; those of an engine that was unloaded before are forgotten."""
        if self._processes is not None:
            self.registry.unregister(self._processes)
        self._processes = ProcessMetrics(self._labels["model_name"], usages, cores)
        self.registry.register(self._processes)

    def show_sleep(self, read: Callable[[], str]) -> None:
        """Show which of `SLEEP_STATES` the engine is in."""
        for state in SLEEP_STATES:
            self._sleep.labels(**self._labels, sleep_state=state).set_function(partial(_is_so, read, state))

    def show_held(self, num_held: Callable[[], int]) -> None:
        """Show how many sequences wait for the engine to wake up."""
        self._held.set_function(num_held)

    def show_start(self, process: str, phases: Phases) -> None:
        """Show what the start of "server" or "engine_core" took."""
        for name, seconds in phases:
            self._start.labels(process=process, phase=name).set(seconds)

    def totals(self) -> LiveTotals:
        """What was counted so far, as numbers."""
        drafts = (0.0, 0.0) if self.drafts is None else self.drafts.totals()
        ttft, computed = self._ttft.distribution(), self._step_tokens.distribution().total
        return LiveTotals(
            value_of([self._generation_tokens]), computed, ttft.num_values, value_of([self._preemptions]),
            value_of([self._prefix_queries]), value_of([self._prefix_hits]), *drafts,
            ttft=ttft, itl=self._inter_token.distribution(),
            **({} if (perf := self.perf) is None else {name: getattr(perf, name) for name in PERF_TOTALS}),
        )  # fmt: skip

    @property
    def last_stats(self) -> SchedulerStats:
        """The control plane after the newest step."""
        return self._last_stats

    def all_series(self) -> Merged:
        """The series of the server and of the engine."""
        return Merged([self.server.registry, self.registry])

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        return page(self.all_series())

    @property
    def http(self) -> HttpMetrics:
        """The server's."""
        return self.server.http

    def _gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        """A gauge that shows what `read` returns when it is looked at."""
        family = Gauge(f"vllm:{name}", doc, list(self._labels), registry=self.registry)
        family.labels(**self._labels).set_function(read)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"vllm:{name}", doc, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, doc: str, bounds: Sequence[float]) -> QuickHistogram:
        return QuickHistogram(f"vllm:{name}", doc, bounds, self._labels, self.registry)

    def _make_step_metrics(self) -> None:
        self._last_stats = SchedulerStats()
        self._gauge("num_requests_running", "Running sequences.", lambda: self._last_stats.num_running)
        self._gauge("num_requests_waiting", "Waiting sequences.", lambda: self._last_stats.num_waiting)
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting sequences by reason.", [*self._labels, "reason"],
            registry=self.registry,
        )  # fmt: skip
        waiting_for_capacity = by_reason.labels(**self._labels, reason="capacity")
        waiting_for_capacity.set_function(lambda: self._last_stats.num_waiting)
        by_reason.labels(**self._labels, reason="deferred").set(0)
        doc = "Fraction of KV-cache blocks in use, 0 to 1."
        self._gauge("kv_cache_usage_perc", doc, lambda: self._last_stats.kv_cache_usage)
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.registry.register(
            GatewayMetrics(
                self._labels,
                lambda: self._last_stats.kv_cache_usage,
                lambda: value_of([self._prefix_queries]),
                lambda: value_of([self._prefix_hits]),
            )
        )
        doc = "Prompt tokens that the prefix cache had not, looked up in host memory, on disk and by KV connectors."
        self._external_queries = self._counter("external_prefix_cache_queries", doc)
        doc = "Prompt tokens loaded from host memory, from disk or by KV connectors."
        self._external_hits = self._counter("external_prefix_cache_hits", doc)
        misses = Counter(
            "quire:prefix_cache_misses", "Prefix-cache misses by reason.",
            [*self._labels, "reason"], registry=self.registry,
        )  # fmt: skip
        self._prefix_misses = {reason: misses.labels(**self._labels, reason=str(reason)) for reason in MissReason}
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        self._make_state_metrics()
        self._make_swap_metrics()
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens read from the prefix cache.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source of their keys and values.",
            [*self._labels, "source"], registry=self.registry,
        )  # fmt: skip
        self._by_source = {
            source: by_source.labels(**self._labels, source=source) for source in ("local_compute", "local_cache_hit")
        }
        self._step_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens per step: prompt tokens computed plus tokens generated.",
            buckets.STEP_TOKENS,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Inter-token latency in seconds.", buckets.TOKEN_LATENCY_S
        )

        self._restarts = Gauge("quire:engine_restarts", "Engine core restarts.", registry=self.registry)
        self._sleep = Gauge(
            "vllm:engine_sleep_state", "1 for the sleep state that the engine, with all its replicas, is in.",
            [*self._labels, "sleep_state"], registry=self.registry,
        )  # fmt: skip
        self._held = Gauge(
            HELD, "Sequences that wait for an engine that sleeps or is paused; they are not among the waiting ones.",
            list(self._labels), registry=self.registry,
        ).labels(**self._labels)  # fmt: skip
        self._resumed = Gauge(
            "quire:resumed_streams", "Sequences resumed after an engine core restart.",
            registry=self.registry,
        )  # fmt: skip

    def _make_state_metrics(self) -> None:
        doc = "Recurrent states kept for later requests, which the prefix cache finds."
        kept = Gauge("quire:state_checkpoints", doc, registry=self.registry)
        kept.set_function(lambda: self._last_stats.num_state_checkpoints)
        size = Gauge("quire:state_checkpoint_bytes", "Bytes of these states.", registry=self.registry)
        size.set_function(lambda: self._last_stats.state_checkpoint_bytes)

    def _make_swap_metrics(self) -> None:
        swapped = Gauge(
            "quire:num_requests_swapped", "Preempted sequences with blocks in the swap space.",
            registry=self.registry,
        )  # fmt: skip
        swapped.set_function(lambda: self._last_stats.num_swapped)
        self._preemptions_by_mode = Counter(
            "quire:preemptions", "Preemptions by mode (recompute or swap).", ["mode"],
            registry=self.registry,
        )  # fmt: skip
        self._swapped_bytes = Counter(
            "quire:swapped_bytes", "Bytes of blocks copied to the swap space (out) and back (in).", ["direction"],
            registry=self.registry,
        )  # fmt: skip
        self._kv_batches_dropped = Counter(
            "quire:kv_event_batches_dropped", "Batches of KV events dropped because the queue was full.",
            registry=self.registry,
        )  # fmt: skip
        self._connector = Counter(
            "quire:kv_connector", "What the KV connector did: blocks loaded, failed, saved and unsaved, late loads, "
            "errors, and its own counts.", ["event"], registry=self.registry,
        )  # fmt: skip
        for mode in ("recompute", "swap"):
            self._preemptions_by_mode.labels(mode=mode)
        for direction in ("out", "in"):
            self._swapped_bytes.labels(direction=direction)

    def _make_request_metrics(self) -> None:
        sizes = buckets.decades(self._max_len)
        success = Counter(
            "vllm:request_success",
            "Finished sequences by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS}
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests rejected: queue full.", ["model_name", "reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in QUEUE_LIMITS:
            self._rejections.labels(model_name=self._labels["model_name"], reason=reason)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self._request_generation = self._histogram("request_generation_tokens", "Generated tokens of a request.", sizes)
        self._request_max_generation = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest completion.", sizes
        )
        self._request_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", sizes)
        self._request_computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request computed (not read from the prefix cache).",
            sizes,
        )
        self._request_n = self._histogram("request_params_n", "Number of completions requested (n).", buckets.ANSWERS)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", buckets.PREEMPTIONS
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token in seconds.", buckets.TTFT_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, in seconds.",
            buckets.TOKEN_LATENCY_S,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "End-to-end latency in seconds.", buckets.REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Queue time in seconds.", buckets.REQUEST_S)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Inference time (admission to last token) in seconds.", buckets.REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Prefill time (admission to first token) in seconds.", buckets.REQUEST_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Decode time (first to last token) in seconds.", buckets.REQUEST_S
        )

    def _make_info(self, config: QuireConfig) -> None:
        cache = {name: str(value) for name, value in dataclasses.asdict(config.cache).items()}
        labels = {**cache, **_as_vllm(config.cache, self._max_len), "engine": self._labels["engine"]}
        Gauge("vllm:cache_config_info", "Settings of the KV cache.", list(labels), registry=self.registry).labels(
            **labels
        ).set(1)
        about = {
            "version": __version__,
            "model_name": self._labels["model_name"],
            "device": config.device.device,
            "attention_backend": config.device.attention_backend,
            "kernel_tier": config.device.kernel_tier,
            "num_threads": str(config.device.num_threads),
            "dtype": config.model.dtype,
            "quantization": str(config.model.quantization),
        }
        self._start = Gauge(
            "quire:startup_seconds", "Startup time by phase in seconds.",
            ["process", "phase"], registry=self.registry,
        )  # fmt: skip
        Gauge(
            "quire:engine_info", "Engine, device and kernel information.", list(about), registry=self.registry
        ).labels(**about).set(1)


def _is_so(read: Callable[[], str], state: str) -> bool:
    return read() == state


def _as_vllm(cache: CacheConfig, max_model_len: int) -> dict[str, str]:
    """The cache's settings by the names that gateways for vLLM read; the null page holds no tokens."""
    told = {
        "num_gpu_blocks": str(cache.num_blocks), "gpu_memory_utilization": str(cache.memory_utilization),
        "cache_dtype": cache.kv_cache_dtype,
    }  # fmt: skip
    if cache.num_blocks is not None and cache.block_size is not None:
        size = (cache.num_blocks - 1) * cache.block_size
        told["kv_cache_size_tokens"] = str(size)
        told["kv_cache_max_concurrency"] = f"{size / max_model_len:.2f}"
    return told
