"""Tracing: a span for each request and one for each of its phases, sent to an OpenTelemetry collector.

Told by the request log when a request has ended; nothing is done while it runs. A thread of its own makes the spans and
sends them. What it cannot send, or has no room for, is dropped and counted: no request ever waits for a collector. Owns
that thread and its queue. OpenTelemetry is imported only here, and only when an endpoint is given.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.logger import adopt_logger, get_logger
from quire.server.http.timing_breakdown import TimingBreakdown
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = get_logger(__name__)

SPAN_NAME = "llm_request"
DEFAULT_PATH = "/v1/traces"
MAX_QUEUED = 2048
MAX_BATCH = 256
MAX_WAIT_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
HEADERS = ("traceparent", "tracestate")
FIELD = "otlp_traces_endpoint"


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is recorded of a request.

    Attributes:
        parent: W3C trace context headers that it came with.
        received_ns: Unix time.
        receipt: its phases; the last ends with the request.
        status: of HTTP; 499 = the client went away.
        params: what was asked of the engine, for each of `num_prompts`; None when it was refused before.
    """

    parent: Mapping[str, str]
    path: str
    status: int
    received_ns: int
    receipt: TimingBreakdown
    model: str = ""
    tenant: str = ""
    request_id: str = ""
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    params: SamplingParams | None = None


class Tracing:
    """Sends traces.

    Args:
        exporter: OpenTelemetry's, used by the thread alone.
        on_dropped: called with requests whose spans were not sent; called by either thread.
        max_queued: ended requests that may wait to be sent.
    """

    def __init__(self, exporter: SpanExporter, on_dropped: Callable[[int], None], max_queued: int = MAX_QUEUED) -> None:
        self._exporter = exporter
        self._on_dropped = on_dropped
        self._queue: queue.Queue[EndedRequest | None] = queue.Queue(max_queued)
        self._is_closing = False
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def record(self, ended: EndedRequest) -> None:
        """A request has ended; returns at once."""
        try:
            self._queue.put_nowait(ended)
        except queue.Full:
            self._on_dropped(1)

    def close(self) -> None:
        """Send what is left, for `CLOSE_TIMEOUT_S` at most, and end the thread."""
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        build = SpanBuilder()
        while True:
            batch = self._next_batch()
            if batch:
                self._export([span for ended in batch for span in build.spans(ended)], len(batch))
            elif self._is_closing:
                return

    def _next_batch(self) -> list[EndedRequest]:
        """Requests to be sent together; empty when none came for a while."""
        batch: list[EndedRequest] = []
        deadline = time.monotonic() + (0.0 if self._is_closing else MAX_WAIT_S)
        while len(batch) < MAX_BATCH:
            try:
                wait = max(0.0, deadline - time.monotonic())
                # Waits in short pieces: closing must not wait for the next request.
                ended = self._queue.get(wait > 0 and not self._is_closing, min(wait, 0.1))
            except queue.Empty:
                if self._is_closing or time.monotonic() >= deadline:
                    break
                continue
            if ended is not None:
                batch.append(ended)
        return batch

    def _export(self, spans: list[ReadableSpan], num_requests: int) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # an exporter's failure is no request's
            logger.debug("traces: %s", error)
            is_sent = False
        if not is_sent:
            self._on_dropped(num_requests)
        if is_sent == self._fails:
            self._fails = not is_sent
            state = "are dropped: the collector does not accept them" if self._fails else "are accepted again"
            logger.warning("traces %s", state)


class SpanBuilder:
    """Makes OpenTelemetry's spans of ended requests."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
        self._ended: list[ReadableSpan] = []
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_collector(self._ended))
        self._tracer = provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def spans(self, ended: EndedRequest) -> list[ReadableSpan]:
        """The request's span and its phases'; none when its parent is not sampled."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        start_ns = ended.received_ns
        request = self._tracer.start_span(
            SPAN_NAME, context=self._propagator.extract(dict(ended.parent)), kind=SpanKind.SERVER,
            attributes=attributes(ended), start_time=start_ns,
        )  # fmt: skip
        inside, begin_us = set_span_in_context(request), 0
        for phase, duration_us in ended.receipt.durations_us.items():
            if duration_us:
                child = self._tracer.start_span(phase, context=inside, start_time=start_ns + 1000 * begin_us)
                begin_us += duration_us
                child.end(start_ns + 1000 * begin_us)
        if ended.status >= 500:
            request.set_status(Status(StatusCode.ERROR))
        request.end(start_ns + 1000 * ended.receipt.ends_us[-1])
        spans = list(self._ended)
        self._ended.clear()
        return spans


def attributes(ended: EndedRequest) -> dict[str, Any]:
    """What a request's span says, under the names of OpenTelemetry and vLLM; times in seconds."""
    receipt, params = ended.receipt, ended.params
    said: dict[str, Any] = {
        "http.route": ended.path,
        "http.response.status_code": ended.status,
        "gen_ai.latency.e2e": receipt.ends_us[-1] / 1e6,
    }
    if ended.tenant:
        said["quire.tenant"] = ended.tenant
    if params is None:
        return said
    durations = receipt.durations_us
    said |= {
        "gen_ai.request.id": ended.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.model": ended.model,
        "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": receipt.num_new_tokens,
        "gen_ai.usage.num_sequences": params.n * ended.num_prompts,
        "gen_ai.latency.time_in_queue": durations["queued"] / 1e6,
        "gen_ai.latency.time_in_model_prefill": durations["prefill"] / 1e6,
        "gen_ai.latency.time_in_model_decode": durations["decode"] / 1e6,
        "gen_ai.latency.time_in_model_inference": (durations["prefill"] + durations["decode"]) / 1e6,
        "quire.cached_tokens": receipt.num_cached_tokens,
        "quire.preemptions": receipt.stats.num_preemptions,
        "quire.restarts": receipt.stats.num_restarts,
    }
    if params.max_tokens is not None:
        said["gen_ai.request.max_tokens"] = params.max_tokens
    if receipt.stats.first_token_ts:
        said["gen_ai.latency.time_to_first_token"] = (receipt.ends_us[2]) / 1e6
    return said


def make_tracing(endpoint: str | None, on_dropped: Callable[[int], None]) -> Tracing | None:
    """What sends to `endpoint`; None without one.

    Raises:
        ConfigError: as `check_endpoint`.
    """
    if endpoint is None:
        return None
    url = check_endpoint(endpoint)
    adopt_logger("opentelemetry")  # which reports a collector that is gone
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S), on_dropped)


def check_endpoint(endpoint: str) -> str:
    """The whole URL of a collector.

    Raises:
        ConfigError: it is none, or OpenTelemetry is not installed.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{FIELD}={endpoint!r} is not an http or https URL", hint="for example http://127.0.0.1:4318/v1/traces",
            field=FIELD,
        )  # fmt: skip
    if not _is_installed():
        raise ConfigError(
            f"{FIELD} needs OpenTelemetry, which is not installed", hint="pip install 'quire[otel]'", field=FIELD
        )
    return endpoint.rstrip("/") + DEFAULT_PATH if parts.path in ("", "/") else endpoint


def _is_installed() -> bool:
    try:
        return all(
            importlib.util.find_spec(name) is not None
            for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        )
    except ModuleNotFoundError:
        return False


def _collector(ended: list[ReadableSpan]) -> Any:
    """A span processor that appends to `ended`."""
    from opentelemetry.sdk.trace import SpanProcessor

    class Collector(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    return Collector()
