"""Traces: a span for each request, its phases inside it without a gap, and no request that waits for a collector."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from quire.core.stats import RequestStateStats
from quire.errors import ConfigError
from quire.server.http.timing_breakdown import PHASES, make_receipt
from quire.server.http.tracing import EndedRequest, Tracing, check_endpoint
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, events, post

COMPLETE = "/v1/completions"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP and keeps the spans.

    Attributes:
        status: what it answers.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.status = 200
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                if collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return None

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def requests(self) -> list[Any]:
        """The spans of requests, oldest first."""
        return sorted((span for span in self.spans if span.name == "llm_request"), key=lambda s: s.start_time_unix_nano)

    def phases(self, request: Any) -> list[Any]:
        """The spans inside a request's, in order."""
        inside = [span for span in self.spans if span.parent_span_id == request.span_id]
        return sorted(inside, key=lambda span: span.start_time_unix_nano)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_requests_phases_cover_its_span_without_a_gap(collector):
    with RunningServer(ScriptedEngine(interval_s=0.002), otlp_traces_endpoint=collector.endpoint) as server:
        body = {**HELLO, "max_tokens": 6, "n": 2, "temperature": 0.5, "top_p": 0.75}
        ids = [post(server, CHAT, body).json()["id"]]
        ids.append(events(post(server, CHAT, {**body, "stream": True}))[0]["id"])
        post(server, COMPLETE, {"prompt": [[7] * 10, [8] * 10], "max_tokens": 4})
        prompt = len(server.engine.prompts[0])
    requests = collector.requests()
    assert len(requests) == 3 and collector.services == {"quire"}
    for request in requests:
        phases = collector.phases(request)
        assert [span.name for span in phases] == [name for name in PHASES if name in {one.name for one in phases}]
        assert {"prepare", "decode", "deliver"} <= {span.name for span in phases}
        assert phases[0].start_time_unix_nano == request.start_time_unix_nano
        assert phases[-1].end_time_unix_nano == request.end_time_unix_nano
        assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in zip(phases, phases[1:], strict=False))
        assert {span.trace_id for span in phases} == {request.trace_id} and not request.parent_span_id
    for request, public_id in zip(requests[:2], ids, strict=True):
        said = attributes(request)
        wall_s = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e9
        assert said["gen_ai.latency.e2e"] == pytest.approx(wall_s, abs=1e-9)
        assert 0 < said["gen_ai.latency.time_to_first_token"] < wall_s
        expected = {
            "gen_ai.request.id": public_id, "gen_ai.request.n": 2, "gen_ai.request.max_tokens": 6,
            "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75, "gen_ai.response.model": "leaf",
            "gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": 12,
            "gen_ai.usage.num_sequences": 2, "http.response.status_code": 200,
        }  # fmt: skip
        assert {name: said[name] for name in expected} == expected


def test_the_clients_trace_goes_on_and_one_that_is_not_sampled_is_not_sent(collector):
    with RunningServer(ScriptedEngine(), otlp_traces_endpoint=f"{collector.endpoint}/v1/traces") as server:
        for flags in ("01", "00"):
            post(server, CHAT, HELLO, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"})
        post(server, CHAT, HELLO, headers={"traceparent": "00-nonsense"})
    own, other = collector.requests()
    assert (own.trace_id.hex(), own.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert other.trace_id.hex() != TRACE_ID and not other.parent_span_id


def test_refused_and_abandoned_requests_have_spans_too_and_other_paths_have_none(collector):
    engine = ScriptedEngine(holds=True)
    with RunningServer(engine, otlp_traces_endpoint=collector.endpoint) as server:
        post(server, CHAT, {"messages": []})
        server.give_up(COMPLETE, {"prompt": [7] * 5}, lambda: engine.live)
        server.wait_until(lambda: not engine.live)
        engine.holds, engine.fails_after = False, 0
        post(server, CHAT, HELLO)
        for path in ("/v1/models", "/health", "/metrics", "/nothing"):
            httpx.get(server.url + path)
    requests = collector.requests()
    assert [attributes(span)["http.response.status_code"] for span in requests] == [400, 499, 500]
    assert [span.status.code for span in requests] == [0, 0, 2]
    assert [[span.name for span in collector.phases(request)] for request in requests[:2]] == [
        ["prepare"], ["prepare", "queued"],
    ]  # fmt: skip


def test_a_collector_that_is_gone_or_refuses_costs_no_request_anything():
    with Collector() as collector:
        collector.status = 400
        with RunningServer(ScriptedEngine(), otlp_traces_endpoint=collector.endpoint) as server:
            assert all(post(server, CHAT, HELLO).status_code == 200 for _ in range(3))
            counted = "quire:traces_dropped_total 3.0"
            server.wait_until(lambda: counted in httpx.get(server.url + "/metrics").text)
            collector.status = 200
            post(server, CHAT, HELLO)
            server.wait_until(lambda: len(collector.requests()) == 1)
            assert counted in httpx.get(server.url + "/metrics").text


def ended() -> EndedRequest:
    receipt = make_receipt(10.0, RequestStateStats(queued_ts=11.0), 12.0)
    return EndedRequest({}, CHAT, 200, 10**18, receipt)


class StuckExporter(SpanExporter):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        self.entered, self.unpin = threading.Event(), threading.Event()
        self.num_spans = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        assert self.unpin.wait(60)
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.unpin.set()


def test_what_has_no_room_is_dropped_at_once_and_counted():
    exporter, dropped = StuckExporter(), []
    tracing = Tracing(exporter, dropped.append, max_queued=4)
    for _ in range(4):
        tracing.record(ended())
    tracing.record(ended())
    assert dropped == [1], "nothing is sent yet, and nobody waits"
    tracing.start()
    assert exporter.entered.wait(60)
    for _ in range(6):
        tracing.record(ended())
    assert dropped == [1, 1, 1], "4 are being sent, 4 wait"
    exporter.unpin.set()
    tracing.close()
    assert exporter.num_spans == 8 * 3 and dropped == [1, 1, 1]


def test_an_exporter_that_raises_is_a_dropped_trace():
    class Raising(StuckExporter):
        def export(self, spans: Any) -> SpanExportResult:
            raise ValueError("not today")

    dropped: list[int] = []
    tracing = Tracing(Raising(), dropped.append)
    tracing.start()
    tracing.record(ended())
    tracing.close()
    assert dropped == [1]


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://host:4317", "http://", "http://host:none", "http:///x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="URL") as caught:
        check_endpoint(endpoint)
    assert caught.value.field == "otlp_traces_endpoint"


def test_without_opentelemetry_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry") else find(name)
    )
    with pytest.raises(ConfigError, match=r"quire\[otel\]") as caught:
        check_endpoint("http://127.0.0.1:4318")
    assert caught.value.field == "otlp_traces_endpoint"


def test_opentelemetry_is_imported_for_an_endpoint_alone():
    program = (
        "import sys; import quire.server.launcher; "
        "from quire.server.http.tracing import make_tracing; assert make_tracing(None, print) is None; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
