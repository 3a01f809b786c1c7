"""`quire run-batch`: through the server's own routes, against a server, and killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.batch import endpoints
from quire.cli import run_batch
from quire.cli.main import main
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

HELLO = [{"role": "user", "content": "Hello"}]


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write_requests(path: Path, count: int = 6) -> str:
    lines = [line(f"id-{n}", {"model": "leaf", "prompt": f"Number {n}", "max_tokens": 3 + n}) for n in range(count)]
    lines += [
        line("chat", {"messages": HELLO, "max_tokens": 4, "n": 2}, "/v1/chat/completions"),
        line("wrong", {"prompt": "a", "temperature": -1}),
        line("unknown", {"prompt": "a", "model": "gpt-17"}),
        "no request",
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def results_of(path: Path) -> dict[str, Any]:
    """By custom_id, without what differs between runs; asserts that each is there once."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        ((record["response"] or {}).get("body") or {}).pop("created", None)
    found = {str(record["custom_id"]): record for record in records}
    assert len(found) == len(records)
    return found


@pytest.fixture
def engines(monkeypatch) -> list[ScriptedEngine]:
    """The engines that the command has started."""
    started: list[ScriptedEngine] = []

    def start(config: Any) -> ScriptedEngine:
        started.append(ScriptedEngine())
        return started[-1]

    monkeypatch.setattr(run_batch, "start_engine", start)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    return started


def test_a_batch_goes_through_the_routes_of_the_server(capsys, engines, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "a-key-of-ours")  # what locks a server does not lock out a batch
    source, out = write_requests(tmp_path / "in"), tmp_path / "out"
    assert main(["run-batch", "-i", source, "-o", str(out), "--model", "leaf", "--max-concurrency", "2"]) == 1
    shown = capsys.readouterr()
    assert "10/10 lines: 7 answered, 2 failed, 1 invalid, 0 already done" in shown.out
    assert engines[0].errored and engines[0].peak == 2 and not engines[0].live
    found = results_of(out)
    assert set(found) == {*(f"id-{n}" for n in range(6)), "chat", "wrong", "unknown", "None"}
    body = found["id-3"]["response"]["body"]
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 6
    assert found["id-3"]["response"]["request_id"] in body["id"]
    chat = found["chat"]["response"]["body"]
    assert [choice["message"]["role"] for choice in chat["choices"]] == ["assistant"] * 2
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["unknown"]["response"]["status_code"] == 404 and found["wrong"]["error"] is None
    assert found["None"]["error"]["code"] == "invalid_line"


def test_a_second_run_asks_only_what_is_open(capsys, engines, tmp_path: Path):
    source, out = write_requests(tmp_path / "in"), tmp_path / "out"
    command = ["run-batch", "-i", source, "-o", str(out)]
    assert main(command) == 1
    expected, lines = results_of(out), out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    assert main(command) == 1
    assert results_of(out) == expected and "4 already done" in capsys.readouterr().out
    assert main(command) == 1 and not engines[2].prompts  # failures of earlier runs count, too
    assert main([*command, "--retry-failed"]) == 1 and len(results_of(out)) == 10


def test_a_batch_without_failures_ends_well(engines, tmp_path: Path):
    (tmp_path / "in").write_text(line("one", {"prompt": "One", "max_tokens": 2}) + "\n")
    command = ["run-batch", "--input-file", str(tmp_path / "in"), "--output-file", str(tmp_path / "out")]
    assert main(command) == 0
    assert main(command) == 0


def test_an_engine_that_dies_ends_the_run_and_leaves_the_rest_open(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(run_batch, "start_engine", lambda config: ScriptedEngine(dies_after=5))
    source, out = write_requests(tmp_path / "in"), tmp_path / "out"
    assert main(["run-batch", "-i", source, "-o", str(out), "--max-concurrency", "1"]) == 2
    said = capsys.readouterr().err
    assert "stopped sending requests: 503" in said and "run the same command again" in said
    assert set(results_of(out)) == {"id-0", "id-1", "id-2"}


def test_a_running_server_is_asked_with_url(capsys, monkeypatch, tmp_path: Path):
    source, out = write_requests(tmp_path / "in"), tmp_path / "out"
    monkeypatch.setenv("QUIRE_API_KEY", "a-key-of-ours")
    with RunningServer(ScriptedEngine(), api_key="a-key-of-ours") as server:
        assert main(["run-batch", "-i", source, "-o", str(out), "--url", f"{server.url}/v1"]) == 1
        assert "7 answered, 2 failed, 1 invalid" in capsys.readouterr().out
        found = results_of(out)
        assert found["id-0"]["response"]["request_id"] in found["id-0"]["response"]["body"]["id"]
        assert len(server.engine.prompts) == 7
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.001)
    status = main(["run-batch", "-i", source, "-o", str(tmp_path / "out2"), "--url", server.url])
    assert status == 2 and "connect" in capsys.readouterr().err and set(results_of(tmp_path / "out2")) <= {"None"}
    assert main(["run-batch", "-i", source, "-o", str(out), "--url", "localhost"]) == 2
    assert "--url 'localhost' is not a valid address" in capsys.readouterr().err


def test_an_output_of_other_requests_and_bad_flags_are_refused(capsys, engines, tmp_path: Path):
    source, out = write_requests(tmp_path / "in"), tmp_path / "out"
    out.write_text('{"custom_id": "foreign", "response": {"status_code": 200}}\n')
    assert main(["run-batch", "-i", source, "-o", str(out)]) == 2
    assert "foreign" in capsys.readouterr().err
    assert main(["run-batch", "-i", source, "-o", str(tmp_path / "o"), "--max-concurrency", "0"]) == 2
    assert main(["run-batch", "-i", source, "-o", str(tmp_path / "o"), "--api-key", "a-key-of-ours"]) == 2
    assert "QUIRE_API_KEY" in capsys.readouterr().err
    assert main(["run-batch", "-i", source]) == 2 and "--output-file" in capsys.readouterr().err
    assert not engines


def test_a_batch_killed_in_the_middle_goes_on_to_the_answers_of_an_undisturbed_run(tmp_path: Path, request):
    source = tmp_path / "in"
    fields = {"max_tokens": 40, "ignore_eos": True}
    lines = [line(f"g{n}", {"prompt": f"Number {n}", "temperature": 0, **fields}) for n in range(8)]
    lines += [line(f"s{n}", {"prompt": f"Number {n}", "temperature": 1, **fields}) for n in range(8)]  # without a seed
    lines += [line(f"c{n}", {"messages": HELLO, "seed": n, **fields}, "/v1/chat/completions") for n in range(8)]
    source.write_text("\n".join(lines) + "\n")

    def start(out: Path, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(out), "--model", "leaf"]
        options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--num-threads", "1", *flags]
        process = subprocess.Popen([*command, *options], env={**os.environ, "QUIRE_LOG_LEVEL": "ERROR"})
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        return process

    whole = start(tmp_path / "whole")
    out = tmp_path / "out"
    process = start(out, "--max-concurrency", "1")
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "it was quicker than the test"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 <= out.read_bytes().count(b"\n") < 24
    with out.open("ab") as file:  # as if it had been killed in the middle of a write
        file.write(b'{"id": "batch_req_00", "custom_id": "g0", "resp')
    assert start(out).wait(120) == 0 and whole.wait(120) == 0
    found = results_of(out)
    assert len(found) == 24 and found == results_of(tmp_path / "whole")
