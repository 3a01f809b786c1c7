"""`quire bench serve` against this server, servers that break, and a client that is the limit itself."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench import processes
from quire.bench.client_watch import LagProbe
from quire.bench.load import run_load, run_on_loop
from quire.bench.records import Job, Load, Target
from quire.cli import bench_serve
from quire.cli.main import main
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

# A loaded machine must not make these tests fail: whether the client was the limit has its own tests.
PATIENT = ["--max-client-lag-ms", "1e6", "--max-client-cpu", "1e6", "--disable-tqdm"]
SMALL = ["--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "8", *PATIENT]


TEXT, NUMBER = "text", "number"
SCHEMA = {
    "benchmark": TEXT, "date": TEXT, "client_version": TEXT, "base_url": TEXT, "endpoint": TEXT, "model_id": TEXT,
    "dataset_name": TEXT, "num_prompts": int, "request_rate": TEXT, "burstiness": NUMBER, "max_concurrency": int,
    "seed": int, "extra_fields": dict, "duration": NUMBER, "completed": int, "failed": int, "failures_by_kind": dict,
    "first_failures": list, "token_count_source": TEXT, "total_input_tokens": int, "total_output_tokens": int,
    "tokens_per_event": NUMBER, "request_throughput": NUMBER, "output_throughput": NUMBER,
    "total_token_throughput": NUMBER, "request_goodput": NUMBER, "max_concurrent_requests": int,
    "goodput_objectives_ms": dict, "client_limited": list, "client": dict,
    **{f"{name}_{metric}_ms": NUMBER for metric in ("ttft", "tpot", "itl", "e2el")
       for name in ("mean", "median", "std", "p50", "p99.9")},
}  # fmt: skip
CLIENT_SCHEMA = {
    "num_processes": int, "cpu_share": NUMBER, "lag_p50_ms": NUMBER, "lag_p99_ms": NUMBER, "lag_max_ms": NUMBER,
    "dispatch_p99_ms": NUMBER, "dispatch_max_ms": NUMBER, "rate_share": type(None), "num_local_errors": int,
}  # fmt: skip


def assert_schema(record: dict[str, Any], schema: dict[str, Any]) -> None:
    """Exactly the fields of `schema`, each of its type."""
    assert set(record) == set(schema)
    for name, kind in schema.items():
        kinds = {TEXT: str, NUMBER: (int, float)}.get(kind, kind)
        assert isinstance(record[name], kinds), name


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer(ScriptedEngine(), api_key="a-key-of-ours") as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a-key-of-ours")


def bench(capsys: Any, url: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object of the last line, what was said on stderr."""
    status = main(["bench", "serve", "--base-url", url, *flags])
    shown = capsys.readouterr()
    return status, json.loads(shown.out.splitlines()[-1]) if shown.out else {}, shown.err


def test_a_run_counts_every_request_and_token(capsys, running, tmp_path: Path):
    status, result, _ = bench(
        capsys, running.url, *SMALL, "--num-warmups", "3", "--goodput", "e2el:1e9", "--save-result", "--save-detailed",
        "--max-concurrency", "4",
        "--result-dir", str(tmp_path), "--plot", str(tmp_path / "plot.svg"), "--metric-percentiles", "50,99.9",
    )  # fmt: skip
    assert status == 0
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "leaf")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 20, 12 * 8)
    assert result["token_count_source"] == "usage" and result["client_limited"] == []
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert result["output_throughput"] == pytest.approx(96 / result["duration"])
    assert_schema(result, SCHEMA)
    assert_schema(result["client"], CLIENT_SCHEMA)
    assert result["median_ttft_ms"] <= result["median_e2el_ms"]
    (file,) = tmp_path.glob("*.json")
    details = json.loads(file.read_text())
    assert [len(details[name]) for name in ("ttfts_ms", "itls_ms", "errors", "input_lens")] == [12] * 4
    assert {len(one) for one in details["itls_ms"]} == {7}
    assert result == {name: details[name] for name in result}
    points = list(ElementTree.parse(tmp_path / "plot.svg").iter("{http://www.w3.org/2000/svg}circle"))
    assert len(points) == 12 + 12 * 7


@pytest.mark.parametrize(
    "flags",
    [
        ["--endpoint", "/v1/chat/completions"],
        ["--backend", "openai-chat", "--model", "leaf", "--temperature", "0.5"],
        ["--max-concurrency", "2", "--num-client-processes", "2"],
        ["--request-rate", "400", "--burstiness", "0.5", "--ignore-eos"],
        ["--random-prefix-len", "9", "--random-range-ratio", "0.5", "--ready-check-timeout-sec", "60"],
        ["--extra-body", '{"return_token_ids": true, "stream_options": null}'],
    ],
    ids=["chat", "chat backend", "processes", "rate", "prefix", "token ids"],
)
def test_each_way_of_asking_is_answered(capsys, running, flags: list[str]):
    status, result, _ = bench(capsys, running.url, *SMALL, *flags)
    assert (status, result["completed"], result["failures_by_kind"]) == (0, 12, {})
    has_ids = "--extra-body" in flags
    assert result["token_count_source"] == ("token_ids" if has_ids else "usage")
    assert result["total_output_tokens"] == 96 or "--random-range-ratio" in flags
    assert (result["total_input_tokens"] is None) == has_ids
    if "--max-concurrency" in flags:
        assert result["max_concurrent_requests"] <= 2 and result["client"]["num_processes"] == 2


def test_requests_that_the_server_refuses_are_failures(capsys, running):
    flags = [*SMALL, "--extra-body", '{"temperature": -1}']
    status, result, _ = bench(capsys, running.url, *flags)
    assert status == 1 and result["failures_by_kind"] == {"status 400": 12} and result["completed"] == 0
    assert "temperature" in result["first_failures"][0]["message"] and len(result["first_failures"]) == 10
    assert bench(capsys, running.url, *flags, "--allow-failures")[0] == 0
    status, result, said = bench(capsys, running.url, *flags, "--num-warmups", "2")
    assert status == 2 and result == {} and "2 of 2 warm-up requests failed: status 400" in said


def test_a_wrong_key_and_no_server_are_said_at_once(capsys, running, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "another-key")
    status, _, said = bench(capsys, running.url, *SMALL)
    assert status == 2 and "status 401" in said and "QUIRE_API_KEY" in said
    status, _, said = bench(capsys, "http://127.0.0.1:1", *SMALL)
    assert status == 2 and "connect" in said
    monkeypatch.delenv("QUIRE_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-ours")
    assert bench(capsys, running.url, *SMALL)[0] == 0


def test_a_run_that_the_client_limited_is_refused(capsys, running, monkeypatch, tmp_path: Path):
    async def held(self: LagProbe) -> None:
        self.lags_s = [0.5] * 100

    monkeypatch.setattr(LagProbe, "run", held)
    few = ["--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "2", "--disable-tqdm"]
    saved = ["--save-result", "--result-dir", str(tmp_path)]
    status, result, said = bench(capsys, running.url, *few, *saved, "--max-client-cpu", "1e6")
    assert status == 1 and set(result) == {"benchmark", "refused", "client"} and not list(tmp_path.iterdir())
    assert "500.0 ms late" in said and "--allow-client-limited" in said
    status, result, said = bench(capsys, "http://127.0.0.1:1", *few, "--model", "leaf")
    assert status == 1 and result["failures_by_kind"] == {"connect": 2} and "late" not in said
    status, result, _ = bench(capsys, running.url, *few, *saved, "--max-client-cpu", "1e6", "--allow-client-limited")
    assert status == 0 and result["completed"] == 2 and "500.0 ms late" in result["client_limited"][0]
    assert list(tmp_path.iterdir())


def test_a_loop_that_is_held_is_noticed(running):
    """The real probe on a real loop: whoever holds it for longer than the limit is found out."""
    target = Target(
        host="127.0.0.1", port=running.port, path="/v1/completions", models_path="/v1/models",
        headers={"authorization": "Bearer a-key-of-ours"},
    )  # fmt: skip
    body = json.dumps({"prompt": [200, 201], "max_tokens": 4, "stream": True})
    load = Load(
        target=target, jobs=[Job(number, 0.0, body) for number in range(8)], max_concurrency=1, timeout_s=60,
        has_rate=False,
    )  # fmt: skip
    report = run_on_loop(run_load(load, lambda _: time.sleep(0.06)))
    assert all(record.failure is None for record in report.records)
    assert report.health.lag_p99_ms > 20


def test_too_few_open_files_are_refused_before_the_run(capsys, running, monkeypatch):
    monkeypatch.setattr(bench_serve, "missing_files", lambda needed: needed - 3)
    status, _, said = bench(capsys, running.url, *SMALL)
    assert status == 2 and "9 files too few for 12 connections" in said


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--num-prompts", "0"], "num_prompts"), (["--request-rate", "0"], "request_rate"),
        (["--burstiness", "-1"], "burstiness"), (["--max-concurrency", "0"], "max_concurrency"),
        (["--dataset-name", "sharegtp"], "'sharegpt'"), (["--dataset-name", "custom"], "--dataset-path"),
        (["--percentile-metrics", "ttft,tptt"], "tptt"), (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--metric-percentiles", "x"], "--metric-percentiles"), (["--goodput", "ttft=1"], "goodput"),
        (["--extra-body", "[]"], "JSON object"), (["--extra-body", '{"n": 2}'], "set by the benchmark"),
        (["--header", "x"], "NAME=VALUE"), (["--header", "a b=c"], "header"),
        (["--endpoint", "/v1/embeddings"], "endpoint"),
        (["--base-url", "127.0.0.1:8000"], "address"), (["--num-client-processes", "99"], "client processes"),
        (["--random-vocab-size", "100"], "random_vocab_size"), (["--num-promts", "3"], "--num-prompts"),
        (["--backend", "opena"], "openai"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_flag_is_refused_by_name(capsys, running, flags: list[str], word: str):
    status, _, said = bench(capsys, running.url, *SMALL, "--model", "leaf", *flags)
    assert status == 2 and word in said


# Servers that break.

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class RawServer:
    """Answers every request with the same parts and closes, or keeps the connection.

    Attributes:
        asked_s: when each request had come; `sent_s` when each part of each answer was sent.
    """

    def __init__(self, parts: list[bytes], keeps: bool) -> None:
        self.asked_s: list[float] = []
        self.sent_s: list[list[float]] = []
        self.num_connections = 0
        self._parts, self._keeps = parts, keeps
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(60)

    def _run(self) -> None:
        self._ends = asyncio.Event()
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._listener)
        await self._ends.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait({task})

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.asked_s.append(time.monotonic())
                times: list[float] = []
                for part in self._parts:
                    times.append(time.monotonic())
                    writer.write(part)
                    await writer.drain()
                self.sent_s.append(times)
                if not self._keeps:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize(
    ("parts", "keeps", "kind"),
    [
        ([], False, "early close"),
        ([b"HTTP/1.1 200"], False, "early close"),
        ([STREAM, chunk(TOKEN)], False, "early close"),
        ([STREAM, chunk(TOKEN), b"0\r\n\r\n"], False, "incomplete stream"),
        ([STREAM, b"zz\r\n"], False, "malformed response"),
        ([b"SMTP ready\r\n"], True, "malformed response"),
        ([STREAM, chunk(b"data: {\n\n"), b"0\r\n\r\n"], True, "malformed event"),
        ([STREAM, chunk(b'data: {"error": {"message": "no"}}\n\n'), b"0\r\n\r\n"], True, "error event"),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"], True, "status 503"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"], True, "no stream"),
        ([STREAM, chunk(TOKEN)], True, "timeout"),
    ],
    ids=[
        "closes at once", "half a head", "half a stream", "no end", "no chunk", "no HTTP", "no JSON", "error event",
        "busy", "no stream", "hangs",
    ],
)  # fmt: skip
def test_a_broken_server_is_a_failure_of_its_kind(capsys, parts: list[bytes], keeps: bool, kind: str):
    with RawServer(parts, keeps) as server:
        flags = ["--model", "m", "--num-prompts", "3", "--max-concurrency", "2", "--request-timeout", "0.3", *PATIENT]
        if kind != "timeout":
            flags[flags.index("0.3")] = "30"
        status, result, _ = bench(capsys, server.url, *flags)
    assert status == 1 and result["failures_by_kind"] == {kind: 3} and result["failed"] == 3
    assert [one["index"] for one in result["first_failures"]] == [0, 1, 2]


def test_times_are_never_before_the_server_sent_nor_requests_after_it_read(capsys):
    """One clock for both: causality holds for every token."""
    parts = [STREAM, chunk(TOKEN), chunk(TOKEN), chunk(LAST), b"0\r\n\r\n"]
    with RawServer(parts, keeps=True) as server:
        target = Target(host="127.0.0.1", port=int(server.url.rsplit(":")[-1]), path="/c", models_path="/m")
        jobs = [Job(number, 0.0, "{}") for number in range(5)]
        report = run_on_loop(
            run_load(Load(target=target, jobs=jobs, max_concurrency=1, timeout_s=60, has_rate=False))
        )  # fmt: skip
    assert server.num_connections == 1  # kept from one request to the next
    for record, asked_s, sent_s in zip(report.records, server.asked_s, server.sent_s, strict=True):
        assert record.failure is None and len(record.event_times) == 3
        assert record.started_s <= asked_s
        assert all(came >= sent for came, sent in zip(record.event_times, sent_s[1:4], strict=True))
        assert record.ended_s == record.event_times[-1]


def test_a_kept_connection_that_the_server_gave_up_is_replaced():
    with RawServer([STREAM, chunk(LAST), b"0\r\n\r\n"], keeps=False) as server:
        target = Target(host="127.0.0.1", port=int(server.url.rsplit(":")[-1]), path="/c", models_path="/m")
        jobs = [Job(number, 0.0, "{}") for number in range(5)]
        report = run_on_loop(
            run_load(Load(target=target, jobs=jobs, max_concurrency=1, timeout_s=60, has_rate=False))
        )  # fmt: skip
    assert [record.failure for record in report.records] == [None] * 5 and server.num_connections == 5


def test_a_load_is_dealt_out_whole():
    jobs = [Job(number, float(number), "{}") for number in range(7)]
    target = Target(host="h", port=1, path="/c", models_path="/m")
    load = Load(target=target, jobs=jobs, max_concurrency=5, timeout_s=1, has_rate=True)
    shares = processes.split(load, 3)
    assert sorted(job.index for share in shares for job in share.jobs) == list(range(7))
    assert [share.max_concurrency for share in shares] == [2, 2, 1]


def test_a_client_process_that_fails_ends_the_run(capsys, running, monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    status, _, said = bench(capsys, running.url, *SMALL, "--num-client-processes", "2")
    assert status == 2 and "client process" in said
