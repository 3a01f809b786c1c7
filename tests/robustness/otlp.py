"""`make test-otlp`: a server sends traces through a real collector (rotel, from its wheel), which is killed meanwhile.

    quire serve --otlp-traces-endpoint -> rotel (OTLP/HTTP in, OTLP/HTTP out) -> a backend of this test

Every request must arrive once, with its parent, its attributes and phases that fill it; while the collector is gone no
request fails, what was not sent is counted, and what comes after is sent again. The log is JSON, one object a line,
with the ids of the same requests.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.robustness.server_process import ServerProcess, wait_until
from tests.server.test_tracing import Collector

GZIP = b"\x1f\x8b"
LEVELS = {"debug", "info", "warning", "error", "critical"}
ACCESS = {"method", "path", "status", "seconds", "id"}


class Backend(Collector):
    """Where the collector sends to, compressed."""

    def take(self, body: bytes) -> None:
        """As `Collector.take`."""
        super().take(gzip.decompress(body) if body[:2] == GZIP else body)


class Rotel:
    """The collector's process."""

    def __init__(self, program: Path, folder: Path, backend: str) -> None:
        self._command = [
            str(program), "start", "--exporter", "otlp", "--otlp-exporter-protocol", "http",
            "--otlp-exporter-endpoint", backend,
            "--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "agent.log"),
        ]  # fmt: skip
        self.ports = [_free_port(), _free_port()]
        self._folder = folder
        self.start()

    @property
    def endpoint(self) -> str:
        """For traces over HTTP."""
        return f"http://127.0.0.1:{self.ports[0]}/v1/traces"

    def start(self) -> None:
        """Run it, until it listens."""
        http, grpc = (f"127.0.0.1:{port}" for port in self.ports)
        with (self._folder / "rotel.log").open("a") as log:
            self._process = subprocess.Popen(
                [*self._command, "--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc], stdout=log, stderr=log
            )
        wait_until(lambda: _listens(self.ports[0]), "the collector listens", 30)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(url: str, number: int) -> int:
    """One request with a trace of its own: whole, as a stream, of two prompts, or one that is refused; its status."""
    body: dict[str, Any] = {"model": "leaf", "prompt": f"Story {number}.", "max_tokens": 4 + number % 5}
    body |= ({}, {"stream": True}, {"prompt": ["One.", "Two."]}, {"max_tokens": -1})[number % 4]
    headers = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01", "x-request-id": f"trace-{number}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=180).status_code


def ask_all(url: str, numbers: range) -> None:
    """These requests, four at a time; each must be answered as it should."""
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda number: ask(url, number), numbers))
    assert statuses == [400 if number % 4 == 3 else 200 for number in numbers], statuses


def check_spans(backend: Backend, numbers: range) -> None:
    """Each of these requests arrived once, under its parent, with its facts and its phases."""
    spans = {int.from_bytes(span.trace_id, "big") - 1: span for span in backend.requests()}
    assert len(backend.requests()) == len(spans), "a request arrived twice"
    for number in numbers:
        span = spans[number]
        assert int.from_bytes(span.parent_span_id, "big") == number + 1
        facts = {one.key: one.value for one in span.attributes}
        if number % 4 == 3:
            continue
        assert facts["gen_ai.usage.completion_tokens"].int_value > 0 and facts["gen_ai.response.model"].string_value
        phases = backend.phases(span)
        covered = sum(one.end_time_unix_nano - one.start_time_unix_nano for one in phases)
        assert phases and covered >= 0.99 * (span.end_time_unix_nano - span.start_time_unix_nano)


def dropped(url: str) -> int:
    """Requests whose traces were not sent, as the server counts."""
    page = httpx.get(f"{url}/metrics").text
    return int(float(re.search(r"^quire:traces_dropped_total (\S+)", page, re.M)[1]))  # type: ignore[index]


def check_log(lines: list[str], count: int) -> int:
    """Every line is one record with the same fields, and each request has its line; returns the number of lines."""
    ids = set()
    for line in lines:
        record = json.loads(line)
        assert {"time", "level", "logger", "message"} <= record.keys() and record["level"] in LEVELS, line
        if record["logger"] == "quire.access" and record["path"].startswith("/v1/"):
            assert record.keys() >= ACCESS and isinstance(record["status"], int), line
            ids.add(record.get("x_request_id", record["id"]).removeprefix("cmpl-"))
    assert {f"trace-{number}" for number in range(count)} <= ids, "each request has a line with its id"
    return len(lines)


def main() -> int:
    """Exit code 0 when all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="requests before, while and after the collector is gone")
    args = parser.parse_args()
    found, count = importlib.util.find_spec("rotel"), args.count
    if found is None or found.origin is None:
        sys.exit("no rotel: run make test-otlp, which installs it")
    program = Path(found.origin).with_name("rotel-agent")
    with tempfile.TemporaryDirectory() as name, Backend() as backend:
        rotel = Rotel(program, Path(name), backend.endpoint)
        try:
            with ServerProcess("--otlp-traces-endpoint", rotel.endpoint, "--log-format", "json") as server:
                url = f"http://127.0.0.1:{server.port}"
                ask_all(url, range(count))
                wait_until(lambda: len(backend.requests()) >= count, "all traces arrive", 30)
                check_spans(backend, range(count))
                rotel.kill()
                ask_all(url, range(count, 2 * count))
                wait_until(lambda: dropped(url) == count, "what was not sent is counted", 60)
                rotel.start()
                ask_all(url, range(2 * count, 3 * count))
                wait_until(lambda: len(backend.requests()) >= 2 * count, "traces arrive again", 30)
                check_spans(backend, range(2 * count, 3 * count))
                log = server.log
        finally:
            rotel.kill()
    num_lines = check_log(log.splitlines(), 3 * count)
    assert backend.services, "the service has a name"
    print(
        f"test-otlp: {3 * count} requests, {2 * count} traces through rotel, {count} counted as dropped; "
        f"{num_lines} lines of JSON"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
