"""Two servers behind vllm-router, which learns from their KV events who has which prefix.

    QUIRE_ROUTER=PATH/vllm-router python -m tests.robustness.router --rounds 6

Prefix A is computed by the first server, prefix B by the second. Then requests that go on after A or B come to the
router in turn: each must be answered by the server that has its prefix, from its cache. Then the first server's engine
core is killed, which loses its pages, and the second one computes A: the router must have heard that A is gone from the
first, and send both prefixes to the second. The last line is how many requests came to the right server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.robustness.server_process import ServerProcess, children_of, wait_until

BLOCK_SIZE = 16
TEXTS = {
    "A": "The keeper of the lighthouse writes down every ship that passes, its name, its flag and its cargo. " * 6,
    "B": "In the valley below the mill, three brothers grow barley, and each of them has a horse of his own. " * 6,
}
START_TIMEOUT_S = 60.0


def find_router() -> str | None:
    """The router's program: named by QUIRE_ROUTER, or on the path."""
    return os.environ.get("QUIRE_ROUTER") or shutil.which("vllm-router")


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def replica() -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server with KV events, and the settings of these."""
    events = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    config = json.dumps({"enable_kv_cache_events": True, **events})
    flags = ("--block-size", str(BLOCK_SIZE), "--kv-events-config", config, "--num-gpu-blocks-override", "512")
    with ServerProcess(*flags) as server:
        yield server, events


@contextmanager
def router(program: str, replicas: list[tuple[ServerProcess, dict[str, str]]]) -> Iterator[str]:
    """A router in front of `replicas`; its address."""
    port, metrics_port = free_port(), free_port()
    urls = [f"http://127.0.0.1:{server.port}" for server, _ in replicas]
    command = [
        program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
        "--prometheus-host", "127.0.0.1", "--policy", "kv_aware", "--worker-urls", *urls,
        "--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", "leaf",
    ]  # fmt: skip
    for url, (_, events) in zip(urls, replicas, strict=True):
        command += ["--kv-event-source", f"{url}={events['endpoint']}"]
        command += ["--kv-event-replay-source", f"{url}={events['replay_endpoint']}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"), "the router answers", START_TIMEOUT_S)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(url: str) -> bool:
    """Whether a server answers its health check."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, text: str) -> int:
    """Tokens of a chat's prompt that were found in the cache."""
    body = {
        "model": "leaf", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def num_answered(server: ServerProcess) -> float:
    """Answers that a server has ended."""
    page = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith("vllm:request_success_total{")
    )


def run(program: str, rounds: int) -> int:
    """Requests that came to the server that has their prefix, before and after a core is killed."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica()) for _ in TEXTS]
        url = stack.enter_context(router(program, replicas))
        owners = dict(zip(TEXTS, (server for server, _ in replicas), strict=True))
        for name, server in owners.items():
            assert ask(f"http://127.0.0.1:{server.port}", TEXTS[name]) == 0
        time.sleep(1.0)  # for the events to reach the router
        num_right = send_rounds(url, owners, range(rounds))
        kill_core(owners["A"])
        owners["A"] = owners["B"]
        ask(f"http://127.0.0.1:{owners['A'].port}", TEXTS["A"])
        time.sleep(1.0)
        return num_right + send_rounds(url, owners, range(rounds, 2 * rounds))


def send_rounds(url: str, owners: dict[str, ServerProcess], rounds: range) -> int:
    """How many of the requests of these rounds came to the server that has their prefix."""
    num_right = 0
    for number in rounds:
        for name in ("A", "B") if number % 3 else ("B", "A"):
            before = num_answered(owners[name])
            cached = ask(url, f"{TEXTS[name]} And then, in year {number}?")
            is_right = num_answered(owners[name]) == before + 1 and cached > 0
            num_right += is_right
            print(f"round {number}: {name}, {cached} tokens cached: {'right' if is_right else 'WRONG'}")
    return num_right


def kill_core(server: ServerProcess) -> None:
    """Kill a server's engine core, and wait for the next one."""
    pid = server.core_pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in children_of(server.pid), "the core is gone")
    wait_until(lambda: is_ready(f"http://127.0.0.1:{server.port}"), "another core answers", START_TIMEOUT_S)


def main() -> int:
    """Run, and print the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    program = find_router()
    if program is None or not Path(program).exists():
        print("vllm-router is not installed: pip install vllm-router, into an environment of its own, and set")
        print("QUIRE_ROUTER to its program; skipped")
        return 0
    num_right = run(program, rounds)
    print(f"requests that came to the server that has their prefix: {num_right} of {4 * rounds}")
    return 0 if num_right == 4 * rounds else 1


if __name__ == "__main__":
    sys.exit(main())
