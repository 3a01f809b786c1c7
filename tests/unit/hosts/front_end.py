"""vLLM's side of the EngineCore protocol: front ends for tests, without any text."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import zmq

IDENTITY = b"\0\0"
FIELDS = (
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time",
    "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds", "prompt_is_token_ids", "client_index",
    "current_wave", "priority", "trace_headers", "resumable", "external_req_id", "reasoning_ended",
    "reasoning_parser_kwargs", "abort_immediately", "session_id", "kv_hints",
)  # fmt: skip
DEFAULTS = {"arrival_time": 1.0, "client_index": 0, "current_wave": 0, "priority": 0, "resumable": False,
            "abort_immediately": False}  # fmt: skip
EOS = 2  # of leaf
WAIT_MS = 120_000


def array_of(value: Any) -> np.ndarray:
    """An array as it is sent, of numpy or of torch."""
    dtype, shape, data = value
    assert data.code == 3
    return np.frombuffer(data.data, np.dtype(dtype)).reshape(shape)


class FrontEnds:
    """`num_clients` front ends of one engine core, each with a socket for requests and one for outputs."""

    def __init__(self, num_clients: int = 1) -> None:
        self.context = zmq.Context()
        self.handshake = self.context.socket(zmq.ROUTER)
        self.port = self.handshake.bind_to_random_port("tcp://127.0.0.1")
        self.inputs = [self.context.socket(zmq.ROUTER) for _ in range(num_clients)]
        self.outputs = [self.context.socket(zmq.PULL) for _ in range(num_clients)]
        for socket in (*self.inputs, *self.outputs):
            socket.bind("tcp://127.0.0.1:*")
        self.process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    def addresses(self) -> dict[str, list[str]]:
        """Where the core is to connect to."""
        return {
            name: [socket.getsockopt(zmq.LAST_ENDPOINT).decode() for socket in sockets]
            for name, sockets in (("inputs", self.inputs), ("outputs", self.outputs))
        }

    def start(self, model: str, *flags: str) -> None:
        """Start the core as vllm-rs does, and shake hands with it."""
        command = [
            sys.executable, "-m", "quire", "-m", "vllm.entrypoints.cli.main", "serve", model, "--headless",
            "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self.port),
            "--data-parallel-size", "1", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.take(self.handshake) == [IDENTITY, {"status": "HELLO", "local": True, "headless": True}]
        answer = {"addresses": self.addresses(), "parallel_config": {"data_parallel_size": 1}}
        self.handshake.send_multipart([IDENTITY, msgspec.msgpack.encode(answer)])
        for socket in self.inputs:
            self.ready = self.take(socket)[1]
        assert self.take(self.handshake)[1]["status"] == "READY"

    def take(self, socket: zmq.Socket[bytes]) -> list[Any]:
        """The next message: its first frames, and the last decoded."""
        assert socket.poll(WAIT_MS), "nothing comes"
        *frames, payload = socket.recv_multipart()
        return [*frames, msgspec.msgpack.decode(payload)]

    def send(self, kind: bytes, *payload: Any, client: int = 0) -> None:
        """A message of type `kind`; what is not bytes is encoded."""
        frames = [one if isinstance(one, bytes) else msgspec.msgpack.encode(one) for one in payload]
        self.inputs[client].send_multipart([IDENTITY, kind, *frames])

    def add(self, request_id: str, prompt: Any, client: int = 0, fields: Any = None, **params: Any) -> None:
        """A request; it ends with EOS unless `ignore_eos`, which is said by naming none."""
        if not params.pop("ignore_eos", False):
            params = {"_eos_token_id": EOS, **params}
        values = {"request_id": request_id, "prompt_token_ids": prompt, "sampling_params": params}
        values = {**DEFAULTS, **values, "client_index": client, **(fields or {})}
        self.send(b"\0", [values.get(name) for name in FIELDS], client=client)

    def outputs_of(self, *request_ids: str, client: int = 0) -> dict[str, list[list[Any]]]:
        """All outputs of requests, until each has ended."""
        found: dict[str, list[list[Any]]] = {name: [] for name in request_ids}
        waiting = set(request_ids)
        while waiting:
            message = self.take(self.outputs[client])[0]
            self.stats = message[2] or self.stats
            for output in message[1]:
                found.setdefault(output[0], []).append(output)
                if output[5] is not None:
                    waiting.discard(output[0])
        return found

    def tokens_of(self, request_id: str, client: int = 0) -> list[int]:
        """The tokens of one request, when it has ended."""
        outputs = self.outputs_of(request_id, client=client)[request_id]
        return [token for output in outputs for token in output[1]]

    def call(self, method: str, *args: Any, client: int = 0) -> Any:
        """The value of a utility, or (None, its error)."""
        self.send(b"\3", [client, 77, method, list(args)], client=client)
        while True:
            answer = self.take(self.outputs[client])[0][4]
            if answer is not None:
                call_id, failure, result = answer
                assert call_id == 77
                return (None, failure) if failure is not None else result[1]

    def close(self) -> None:
        """Go away, and wait for the core."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.context.destroy(linger=0)
