"""`quire serve` as a process, from its start-up report to SIGTERM, and `quire chat --url`."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from quire.cli import serve
from quire.cli.main import main
from quire.entrypoints.args import QuireParser
from quire.errors import ConfigError
from quire.server.http.listening import claim_socket_path
from quire.utils.phases import PhaseTimer, process_age_s
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer


def configs(*argv: str):
    parser = QuireParser(prog="quire serve")
    serve.add_arguments(parser)
    return serve.configs_from_args(parser.parse_args(argv))


def test_flags_of_engine_and_server_stand_side_by_side(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 9000\nmax-num-seqs: 7\nmax_num_queued_reqs: 5\nhost: 0.0.0.0\n")
    engine, server = configs("some/model", "--config", str(file), "--port", "0", "--max-body-bytes", "1MiB")
    assert (engine.model.model, engine.scheduler.max_num_seqs) == ("some/model", 7)
    assert (server.http.port, server.http.host) == (0, "0.0.0.0")
    assert (server.limits.max_num_queued_reqs, server.limits.max_body_bytes) == (5, 1 << 20)
    assert configs()[0].model.model == "leaf" and configs()[1].http.host == "127.0.0.1"


def test_tenants_share_unless_told_otherwise_and_one_tenant_is_served_by_arrival():
    policies = [
        configs(*argv)[0].scheduler.scheduling_policy
        for argv in ([], ["--api-key-file", "k"], ["--api-key-file", "k", "--scheduling-policy", "fcfs"])
    ]
    assert policies == ["fcfs", "fair", "fcfs"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "did you mean '--port'"),
        (["--port", "70000"], "0 to 65535"),
        (["--host"], "--help"),
        (["--max-json-depth", "1"], "4 to 200"),
    ],
    ids=["misspelt", "out of range", "no value", "too shallow"],
)
def test_a_bad_server_flag_is_refused_with_the_fix(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        configs(*argv)
    assert message in str(caught.value)


def test_a_unix_socket_is_for_this_user_alone(tmp_path: Path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with RunningServer(ScriptedEngine(), is_given_socket=False, uds=str(path)) as server:
        assert server.server.address() == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://any/live").status_code == 200
        with pytest.raises(ConfigError, match="another server listens on"):
            claim_socket_path(str(path))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://any/live").status_code == 200
    path.unlink(missing_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen on"):
        claim_socket_path(str(path))
    assert path.read_text() == "mine"


def test_the_phases_of_a_start_add_up_to_the_age_of_the_process():
    timer = PhaseTimer("python and imports")
    with timer.phase("one"):
        time.sleep(0.01)
    time.sleep(0.05)  # belongs to the phase that ends next
    with timer.phase("two"):
        pass
    before_s = process_age_s()
    timer.end_phase("three")
    total_s, after_s = sum(seconds for _, seconds in timer.phases), process_age_s()
    assert [name for name, _ in timer.phases] == ["python and imports", "one", "two", "three"]
    assert timer.phases[2][1] >= 0.05
    assert 0.98 * before_s - 0.02 <= total_s <= after_s + 0.02  # the system tells the beginning to 10 ms
    assert f"ready in {total_s:.2f} s: python and imports" in str(timer) and ", one 0.0" in str(timer)


def test_the_examples_of_the_page_run(capsys):
    page = (Path(__file__).parents[2] / "docs/how-to/serve.md").read_text()
    (example,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = "".join(re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    bodies = re.findall(r"-d '(\{.*?\})'", shown)
    with RunningServer(ScriptedEngine()) as server:
        code = example.replace("stream=True", "stream=True, max_tokens=5").replace("http://127.0.0.1:8000", server.url)
        exec(compile(code, "example", "exec"), {})
        assert capsys.readouterr().out.strip()
        for path, body in zip(("/v1/chat/completions", "/v1/completions"), bodies[:2], strict=True):
            answer = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200 and "warnings" not in answer.text


def test_an_answer_that_is_interrupted_counts_the_tokens_that_came(capsys):
    class Interrupting(ScriptedEngine):
        def token(self, prompt: list[int], seed: int, position: int) -> int | None:
            if position == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return super().token(prompt, seed, position)

    with RunningServer(Interrupting(interval_s=0.001)) as server:
        assert main(["chat", "--url", server.url, "--quick", "Hello", "--max-tokens", "1000"]) == 0
    found = re.search(r"\[(\d+) tokens, .*\(stopped\)\]", capsys.readouterr().err)
    assert found is not None and int(found[1]) > 0


def test_chat_talks_to_a_server(capsys, monkeypatch):
    with RunningServer(ScriptedEngine(), api_key="a-key-of-ours") as server:
        arguments = ["chat", "--url", server.url, "--quick", "Hello", "--max-tokens", "5"]
        assert main([*arguments, "--api-key", "a-key-of-ours"]) == 0
        shown = capsys.readouterr()
        assert shown.out.strip() and "5 tokens" in shown.err
        monkeypatch.delenv("QUIRE_API_KEY", raising=False)
        assert main(arguments) == 2 and "API key" in capsys.readouterr().err
        assert main([*arguments, "--api-key", "a-key-of-ours", "--top-p", "9"]) == 1
        assert "top_p" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "--quick", "Hello"]) == 2
    assert "quire serve" in capsys.readouterr().err


def test_a_served_stream_survives_sigterm_and_the_process_ends_cleanly(tmp_path: Path):
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, "-m", "quire", "serve", "leaf", "--port", "0", "--num-gpu-blocks-override", "128"]
    process = subprocess.Popen(command, stderr=log, env={**os.environ, "QUIRE_API_KEY": "a-key-of-ours"})
    try:
        found = None
        while found is None:
            assert process.poll() is None, Path(log.name).read_text()
            time.sleep(0.05)
            found = re.search(r"listening on (http://127\.0\.0\.1:\d+); ready in", Path(log.name).read_text())
        check_start_report(found[1], Path(log.name).read_text())
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="a-key-of-ours", max_retries=0)
        stream = client.completions.create(
            model="leaf", prompt="Once", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        parts = iter(stream)
        next(parts)
        process.send_signal(signal.SIGTERM)
        last = list(parts)[-1]
        assert last.choices[0].finish_reason == "length"
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()


def check_start_report(url: str, log: str) -> None:
    """The log and /metrics tell the same phases, of server and core, and --print-config the settings in the log."""
    chosen = re.search(r"--print-config\): (.*)", log)
    settings = ["leaf", "--port", "0", "--num-gpu-blocks-override", "128"]
    printed = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *settings, "--print-config"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shown = dict(re.findall(r"^(\w+) +(.*?)(?:   <- auto: .*)?$", printed, flags=re.MULTILINE))
    assert chosen and all(shown[name] == value for name, value in re.findall(r"(\w+)=(.*?)(?:, |$)", chosen[1]))
    assert "attention_backend=" in chosen[1] and (shown["port"], shown["num_gpu_blocks_override"]) == ("0", "128")
    page = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer a-key-of-ours"}).text
    for process, line in (("server", r"ready in .*listening \S+ s"), ("engine_core", r"engine core ready in .*")):
        shown = dict(re.findall(rf'quire:startup_seconds{{phase="(.+?)",process="{process}"}} (\S+)', page))
        (report,) = re.findall(line, log)
        told = dict(re.findall(r"(?:: |, )([a-zA-Z ]+?) (\d+\.\d\d) s", report))
        assert {name: f"{float(seconds):.2f}" for name, seconds in shown.items()} == told and len(told) >= 5
        assert "model" in told or "web framework" in told
