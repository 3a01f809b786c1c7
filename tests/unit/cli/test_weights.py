"""`quire weights` asks a server and shows what it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from quire.cli import main as cli


class Answers(BaseHTTPRequestHandler):
    """A server with two replicas."""

    asked: list[Any]

    def do_GET(self) -> None:
        self.answer({"weight_version": None, "replicas": {"0": "v2", "1": ""}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        self.answer({"weight_version": "v3", "replicas": {"0": "v3", "1": "v3"}})

    def answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200 if self.headers["authorization"] else 401)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_versions_are_shown_and_new_weights_are_sent(url, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["weights", "show", "--url", url, "--api-key", "ops"]) == 0
    assert capsys.readouterr().out == "replica 0: v2\nreplica 1: (of the start)\n"
    asked = ["weights", "update", "mine", "--url", url, "--drain-timeout", "5", "--weight-version", "v3"]
    assert cli.main([*asked, "--api-key", "ops"]) == 0
    assert capsys.readouterr().out == "replica 0: v3\nreplica 1: v3\n"
    body = {"path": str(tmp_path / "mine"), "weight_version": "v3", "drain_timeout": 5.0}
    assert Answers.asked == [("/update_weights", "Bearer ops", body)]
    assert cli.main(["weights", "show", "--url", url]) == 2 and "401" in capsys.readouterr().err
    assert cli.main([*asked[:-4], "--drain-timeout", "-1"]) == 2
