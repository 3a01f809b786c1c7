"""NVIDIA Dynamo's front end and workers of this engine: texts, routing by prefix, migration, prefill apart from decode.

    python -m tests.hosts.dynamo

`make test-dynamo`. Installs ai-dynamo with pip into `build/hosts/dynamo` the first time (300 MB). Everything is on the
loopback, without etcd or NATS. The last line is how many checks passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.hosts.programs import Program, answers, environment, free_low_port, free_port, metric, stream_text
from tests.hosts.vllm_rs import CHAT, COMPLETIONS, LEAF, LONG, STORY, TALK, TOOLS, asked, fetched
from tests.robustness.server_process import ServerProcess, wait_until

VERSION = "1.6.1"
BLOCK_SIZE = 16
RUNNING = "vllm:num_requests_running"
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**STORY, "max_tokens": 30, "temperature": 0}),
    (COMPLETIONS, {**STORY, "max_tokens": 30, "seed": 7, "top_p": 0.9}),
    (COMPLETIONS, {**STORY, "max_tokens": 30, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.7}),
    (COMPLETIONS, {**STORY, "max_tokens": 8, "temperature": 0, "logprobs": 3}),
    (COMPLETIONS, {**STORY, "prompt": [5, 6, 7, 8], "max_tokens": 10, "temperature": 0}),
    (CHAT, {**TALK, "max_tokens": 30, "temperature": 0}),
    (CHAT, {**TALK, "max_tokens": 30, "seed": 11, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11, "response_format": {"type": "json_object"}}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11,
            "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}}),
    (CHAT, {"model": "leaf", "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
            "max_tokens": 60, "temperature": 0, "tools": TOOLS}),
]  # fmt: skip
PREFIXES = [
    f"The {keeper} of the {house} writes down all that passes, its name, its flag and its cargo, day by day. " * 6
    for keeper, house in zip(("keeper", "miller", "baker", "sailor", "monk", "widow"), "ABCDEF", strict=True)
]


class Deployment:
    """A front end, and workers that it finds through files of its own.

    Args:
        python: with `dynamo`.
        flags: of the front end.

    Attributes:
        url: of the front end.
    """

    def __init__(self, python: Path, *flags: str) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="d"))
        self._python = str(python)
        self._env = {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": f"{folder}/kv", "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "HOME": folder,
            "XDG_CACHE_HOME": folder,
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "DYN_LOG": "warn", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            self._python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *flags
        ]  # fmt: skip
        self._stack.enter_context(Program(command, lambda: answers(self.url), self._env))

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def worker(self, *flags: str) -> tuple[str, Program]:
        """A worker that is ready: the address of its metrics, and its process."""
        command = [
            self._python, "-m", "quire", "dynamo", "leaf", "--served-model-name", "leaf", "--num-threads", "1",
            "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "1024", "--dyn-tool-call-parser", "hermes",
            *flags,
        ]  # fmt: skip
        return self.program(command)

    def program(self, command: list[str]) -> tuple[str, Program]:
        """Any worker."""
        port = free_low_port()
        url = f"http://127.0.0.1:{port}"
        env = {**self._env, "DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        return url, self._stack.enter_context(Program(command, lambda: answers(url), env))

    def wait_for_model(self) -> None:
        """Wait until the front end serves it."""
        wait_until(lambda: b'"leaf"' in httpx.get(f"{self.url}/v1/models").content, "the model is served")


def check_texts(url: str, own: str) -> None:
    """The same answers as those of `quire serve`, streams too."""
    for path, body in CASES:
        got, expected = asked(url, path, body), asked(own, path, body)
        for one in (got, expected):
            one.pop("stop")  # Dynamo does not say which
        assert got == expected, f"{body}:\n{str(got)[:1500]}\n{str(expected)[:1500]}"
    body = {**STORY, "max_tokens": 60, "seed": 2}
    assert stream_text(url, COMPLETIONS, body) == asked(own, COMPLETIONS, body)["text"]
    status, message = asked(url, COMPLETIONS, {**STORY, "prompt": "a b " * 2000, "max_tokens": 5})
    assert status == 400 and "maximum context length" in message


def check_cancel(url: str, worker: str) -> None:
    """A client that leaves ends its request."""
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json={**LONG, "max_tokens": 2000, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept, as the connection is closed with it
        next(lines)
        wait_until(lambda: metric(worker, RUNNING) == 1, "the request runs")
    wait_until(lambda: metric(worker, RUNNING) == 0, "the request has ended")


def check_routing(url: str, workers: list[str]) -> str:
    """Requests that go on after a prefix come to the worker that has it; returns how many did."""

    def ask(text: str) -> int:
        body = {**TALK, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        usage = httpx.post(f"{url}{CHAT}", json=body, timeout=120).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    queries = [metric(one, "vllm:prefix_cache_queries_total") for one in workers]
    for text in PREFIXES:
        ask(text)
        time.sleep(1.0)  # events reach the router
    hits = [ask(f"{text} Number {number}.") for number in range(4) for text in PREFIXES]
    num_used = sum(
        metric(one, "vllm:prefix_cache_queries_total") > before for one, before in zip(workers, queries, strict=True)
    )
    right = sum(hit >= 6 * BLOCK_SIZE for hit in hits)
    assert right == len(hits), hits
    return f"{right} of {len(hits)} requests found their prefix, on {num_used} workers"


def check_migration(url: str, own: str, workers: list[tuple[str, Program]]) -> None:
    """A stream whose worker is killed goes on with another one, with the same bytes."""
    undisturbed = stream_text(own, COMPLETIONS, LONG)

    def kill(count: int) -> None:
        if count == 60:
            (busy,) = (one for at, one in workers if one.process.poll() is None and metric(at, RUNNING) == 1)
            os.kill(busy.pid, signal.SIGKILL)

    assert stream_text(url, COMPLETIONS, LONG, kill) == undisturbed


def transfer_flags(connector: str, role: str, folder: str) -> tuple[str, ...]:
    """Settings of a worker that hands blocks to others, or takes them."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": role}
    if connector == "ExampleConnector":
        config["kv_connector_extra_config"] = {"shared_storage_path": folder}
    elif role == "kv_producer":
        config["kv_port"] = 0
    return "--kv-transfer-config", json.dumps(config)


def check_disaggregated(python: Path, own: str, count: int, connector: str) -> str:
    """Prompts are computed by a prefill worker and decoded by two others, of which one is killed: no wrong answer."""
    with Deployment(python, "--router-mode", "round-robin", "--migration-limit", "3") as deployment, \
            tempfile.TemporaryDirectory() as folder:  # fmt: skip
        producer, consumer = (transfer_flags(connector, role, folder) for role in ("kv_producer", "kv_consumer"))
        prefill, _ = deployment.worker("--disaggregation-mode", "prefill", *producer)
        decoders = [deployment.worker("--disaggregation-mode", "decode", *consumer) for _ in range(2)]
        deployment.wait_for_model()
        bodies = [
            {**STORY, "prompt": f"Story {number}. {PREFIXES[0][:200]}", "max_tokens": 24, "seed": number}
            for number in range(count)
        ]

        def ask(number: int) -> str:
            if number == count // 2:
                os.kill(decoders[0][1].pid, signal.SIGKILL)
            return str(asked(deployment.url, COMPLETIONS, bodies[number])["text"])

        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(ask, range(count)))
        expected = [str(asked(own, COMPLETIONS, body)["text"]) for body in bodies]
        wrong = sum(one != other for one, other in zip(texts, expected, strict=True))
        num_prefills = metric(prefill, "vllm:request_success_total")
        num_loaded = metric(decoders[1][0], "vllm:prefix_cache_hits_total")  # no two prompts begin alike
        assert wrong == 0 and num_prefills >= count and num_loaded > 0, (wrong, num_prefills, num_loaded)
        told = f"{num_prefills:.0f} prefills, {num_loaded:.0f} tokens loaded by the worker that is left"
        return f"{connector}, {count} requests, {told}"


def check_sidecar(python: Path, own: str) -> None:
    """Dynamo's own worker for vLLM, in front of vllm-rs, in front of this engine."""
    with Deployment(python, "--router-mode", "round-robin") as deployment:
        port, grpc = free_port(), free_port()
        command = [
            str(fetched()), "serve", str(LEAF.absolute()), "--python", str(Path(sys.executable).with_name("quire")),
            "--host", "127.0.0.1", "--port", str(port), "--grpc-port", str(grpc), "--served-model-name", "leaf",
            "--", "--num-threads", "1",
        ]  # fmt: skip
        with Program(command, lambda: answers(f"http://127.0.0.1:{port}")):
            deployment.program([str(python), "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", f"127.0.0.1:{grpc}"])
            deployment.wait_for_model()
            for path, body in ((COMPLETIONS, {**STORY, "max_tokens": 30, "seed": 7}), CASES[5]):
                assert asked(deployment.url, path, body)["text"] == asked(own, path, body)["text"]
            check_cancel(deployment.url, f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def done(name: str) -> Iterator[list[str]]:
    """Print what a check has shown."""
    notes: list[str] = []
    yield notes
    print(f"{name}{''.join(f': {note}' for note in notes)}", flush=True)


def main() -> int:
    """Run the checks; 0 = all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="requests with prefill apart from decode")
    parser.add_argument("--connector", default="TCPConnector", help="of these; also ExampleConnector, NixlConnector")
    options = parser.parse_args()
    count, connector = options.count, options.connector
    start = time.monotonic()
    installs = [[f"ai-dynamo-runtime=={VERSION}"], ["--no-deps", f"ai-dynamo=={VERSION}"], ["packaging"]]
    if connector == "NixlConnector":
        installs.append(["--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"])
    python = environment("dynamo" if connector != "NixlConnector" else "dynamo-nixl", *installs)
    with ServerProcess("--served-model-name", "leaf") as server:
        own = f"http://127.0.0.1:{server.port}"
        with Deployment(python, "--router-mode", "kv", "--migration-limit", "3") as deployment:
            workers = [deployment.worker() for _ in range(2)]
            deployment.wait_for_model()
            with done("the same texts as quire serve"):
                check_texts(deployment.url, own)
            with done("routing by prefix") as notes:
                notes.append(check_routing(deployment.url, [url for url, _ in workers]))
            with done("a worker is killed within a stream, which goes on with the same bytes"):
                check_migration(deployment.url, own, workers)
            (left,) = (url for url, program in workers if program.process.poll() is None)
            with done("a client that leaves ends its request"):
                check_cancel(deployment.url, left)
            with done("a worker that is asked to end does"):
                assert next(one for _, one in workers if one.process.poll() is None).stop() == 0
        with done("prefill apart from decode, one decode worker killed") as notes:
            notes.append(check_disaggregated(python, own, count, connector))
        with done("Dynamo's sidecar for vLLM, over vllm-rs"):
            check_sidecar(python, own)
    print(f"Dynamo {VERSION}: 7 of 7 checks passed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
