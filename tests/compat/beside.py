"""What runs beside an example: a server of its own kind where leaf behind `quire serve` is not what it needs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.compat.rewriting import rewrite
from tests.compat.scripts import SCRIPTS
from tests.robustness.server_process import ServerProcess
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer

LIMIT_S = 120.0
SUBSCRIBER = "features/kv_events/kv_events_subscriber.py"
HEARD = "Received event batch"
# Programs that are served by another one, which runs beside them.
SERVED_BY = {"applications/api_server/client.py": "applications/api_server/server.py"}
SCRIPTED = "the model follows a script"


@dataclass
class Beside:
    """What one example is given.

    Attributes:
        server: "host:port" that it asks.
        arguments: of its command line.
        addresses: what else is replaced in it.
        note: about a model that is not leaf.
    """

    server: str
    arguments: list[str] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)
    note: str = ""


def make_beside(
    name: str,
    path: Path,
    leaf: str,
    workplace: Path,
    environment: Mapping[str, str],
    others: contextlib.ExitStack,
    python: str,
) -> Beside:
    """What runs beside example `name`; it ends with `others`.

    Args:
        leaf: "host:port" of the server that most examples ask.
        python: that has the packages which examples import.
    """
    if name in SERVED_BY:
        host, port = _program(path.parent / Path(SERVED_BY[name]).name, workplace, environment, others, python)
        return Beside(leaf, ["--host", host, "--port", str(port)])
    if name in SCRIPTS:
        engine = WritingEngine()
        engine.write = lambda prompt, seed: SCRIPTS[name](prompt)
        server = others.enter_context(RunningServer(engine, reasoning_parser="think"))
        return Beside(f"127.0.0.1:{server.port}", note=SCRIPTED)
    if name == SUBSCRIBER:
        events, replay = _free_port(), _free_port()
        settings = {
            "enable_kv_cache_events": True, "topic": "kv-events", "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }  # fmt: skip
        process = others.enter_context(ServerProcess("--kv-events-config", json.dumps(settings)))
        addresses = {"localhost:5557": f"127.0.0.1:{events}", "localhost:5558": f"127.0.0.1:{replay}"}
        return Beside(f"127.0.0.1:{process.port}", addresses=addresses)
    return Beside(leaf)


def run_until_heard(
    arguments: list[str], workplace: Path, environment: Mapping[str, str], server: str
) -> tuple[int, str]:
    """(exit status, output) of a subscriber that hears of a prompt, and is then interrupted as by a user."""
    output = workplace / "subscriber.out"
    with output.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=workplace, env={**environment, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and HEARD not in output.read_text():
            if time.monotonic() > deadline:
                process.kill()
                break
            body = {"prompt": f"A prompt of some pages, number {time.monotonic()}. " * 10, "max_tokens": 1}
            httpx.post(f"http://{server}/v1/completions", json=body, timeout=LIMIT_S)
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        status = process.wait(LIMIT_S)
    text = output.read_text()
    return (status if HEARD in text else status or 1), text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(
    path: Path, workplace: Path, environment: Mapping[str, str], others: contextlib.ExitStack, python: str
) -> tuple[str, int]:
    address = ("127.0.0.1", _free_port())
    program = workplace / f"server_{path.name}"
    program.write_text(rewrite(str(path), path.read_text(), f"{address[0]}:{address[1]}"))
    process = subprocess.Popen(
        [python, str(program), "--host", address[0], "--port", str(address[1])],
        cwd=workplace, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    others.callback(process.wait, 60)
    others.callback(process.send_signal, signal.SIGINT)
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            break
        time.sleep(0.2)
    return address
