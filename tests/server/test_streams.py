"""How a stream's bytes reach its client: at once, merged while it is slow, well-formed to the end, whatever happens."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import RequestOutputKind
from quire.engine.output_stream import OutputStream
from quire.errors import EngineGenerateError
from quire.server.http import connection
from quire.server.http.keep_alive import COMMENT
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_openai_client import expected

PATH = "/v1/completions"
IDS = [50, 60, 70]
DONE = b"data: [DONE]\n\n"


def request(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"prompt": IDS, "max_tokens": 5, "stream": True, **fields}).encode()
    lines = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST {PATH} HTTP/{version}\r\n{lines}"
    return head.encode() + b"\r\n\r\n" + body


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    return client


class Reader:
    """Takes responses off a connection."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._data = b""
        self.num_bytes = 0

    def response(self) -> tuple[bytes, list[bytes]]:
        """Head and chunks of one chunked response."""
        head = self._until(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        chunks: list[bytes] = []
        while size := int(self._until(b"\r\n"), 16):
            chunks.append(self._exactly(size))
            assert self._exactly(2) == b"\r\n"
        assert self._exactly(2) == b"\r\n"
        return head, chunks

    def _until(self, end: bytes) -> bytes:
        while end not in self._data:
            self._more()
        found, _, self._data = self._data.partition(end)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            self._more()
        found, self._data = self._data[:size], self._data[size:]
        return found

    def _more(self) -> None:
        data = self._client.recv(1 << 16)
        assert data, "the connection was closed within a response"
        self._data += data
        self.num_bytes += len(data)


def contents(chunks: list[bytes]) -> list[dict[str, Any]]:
    """What the events say, without the last one, which says that nothing more comes."""
    blocks = b"".join(chunks).split(b"\n\n")
    assert blocks[-2:] == [DONE.strip(), b""]
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(one["text"] for content in found for one in content["choices"] if one["index"] == index)


class Unpaced(ScriptedEngine):
    """Goes on while its readers do not read."""

    waits_for_readers = False


@pytest.fixture
def slow() -> Any:
    """A server of an engine that waits for nobody, with sockets that hold little."""
    server = RunningServer(Unpaced())
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with server:
        yield server


def test_every_token_is_an_event_of_its_own_and_the_connection_goes_on(server):
    with connect(server) as client:
        reader = Reader(client)
        for _ in range(2):
            client.sendall(request())
            _, chunks = reader.response()
            assert all(chunk.endswith(b"\n\n") for chunk in chunks) and chunks[-1] == DONE
            assert [len(content["choices"]) for content in contents(chunks)] == [1] * 5
            assert text_of(contents(chunks)) == expected(server, IDS, 5)


def test_requests_that_come_together_are_answered_one_after_the_other(server):
    with connect(server) as client:
        client.sendall(b"".join(request(max_tokens=count) for count in (3, 1, 7)))
        reader = Reader(client)
        for count in (3, 1, 7):
            assert text_of(contents(reader.response()[1])) == expected(server, IDS, count)


def test_an_http_1_0_client_gets_a_body_without_chunks(server):
    with connect(server) as client:
        client.sendall(request("1.0"))
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert text_of(contents([body])) == expected(server, IDS, 5)


def test_streams_go_through_tls(tmp_path: Path):
    names = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-keyout", names[0], "-out", names[1]]
    subprocess.run(command, check=True, capture_output=True)
    with RunningServer(ScriptedEngine(), ssl_keyfile=names[0], ssl_certfile=names[1]) as server:
        context = ssl.create_default_context(cafile=names[1])
        context.check_hostname = False
        with context.wrap_socket(connect(server)) as client:
            client.sendall(request())
            assert text_of(contents(Reader(client).response()[1])) == expected(server, IDS, 5)


def test_an_output_is_written_before_the_engine_goes_on(monkeypatch):
    within: list[bool] = []

    class Engine(ScriptedEngine):
        async def open_stream(
            self, prompt: Any, params: Any, request_id: str, options: RequestOptions = DEFAULT_OPTIONS
        ) -> OutputStream:
            stream = OutputStream(is_delta=params.output_kind is RequestOutputKind.DELTA)
            source = super().generate(prompt, params, request_id, options)

            async def put_all() -> None:
                async for output in source:
                    self.is_putting = True
                    stream.put(output)
                    self.is_putting = False

            self.task = asyncio.ensure_future(put_all())
            return stream

    engine = Engine(interval_s=0.05)
    engine.is_putting = False
    write = connection.BodyWriter.write
    monkeypatch.setattr(
        connection.BodyWriter, "write", lambda self, data: within.append(engine.is_putting) or write(self, data)
    )
    with RunningServer(engine) as server:
        answer = httpx.post(server.url + PATH, json={"prompt": IDS, "max_tokens": 5, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
    assert within == [False, True, True, True, True], "the first one is there before the response begins"


def test_a_slow_reader_gets_everything_in_fewer_pieces(slow):
    count = 1500
    with connect(slow, 4096) as client:
        client.sendall(request(max_tokens=count))
        slow.wait_until(lambda: slow.engine.prompts and not slow.engine.live)
        reader = Reader(client)
        found = contents(reader.response()[1])
    assert text_of(found) == expected(slow, IDS, count)
    assert len(found) < count // 2, "outputs that the client did not take were merged"
    assert reader.num_bytes < 200_000, "what waited for the client was bounded"
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert slow.state.admission.num_answers == 0


def test_a_slow_reader_learns_of_an_error_after_what_came_before(slow):
    slow.engine.fails_after = 1000
    with connect(slow, 4096) as client:
        client.sendall(request(max_tokens=1500))
        slow.wait_until(lambda: slow.engine.prompts and not slow.engine.live)
        found = contents(Reader(client).response()[1])
    assert found[-1]["error"]["type"] == "InternalServerError"
    assert expected(slow, IDS, 1000).startswith(text_of(found[:-1]))


def test_a_slow_reader_that_goes_away_ends_its_work(slow):
    with connect(slow, 4096) as client:
        slow.engine.interval_s = 1e-4
        client.sendall(request(max_tokens=2000))
        slow.wait_until(lambda: slow.engine.live and is_paused(slow))
    slow.wait_until(lambda: not slow.engine.live and not slow.state.admission.num_answers and not slow.state.running)


def is_paused(server: RunningServer) -> bool:
    return any(one.flow.write_paused for one in list(server.server.server_state.connections))


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": [IDS, [1, 2]]}], ids=["one", "n", "prompts"])
def test_a_client_that_goes_away_in_the_middle_ends_its_work(server, fields):
    with connect(server) as client:
        client.sendall(request(max_tokens=2000, **fields))
        assert b"data: " in client.recv(4096) + client.recv(4096)
    server.wait_until(lambda: not server.engine.live and not server.state.running)
    assert server.state.admission.num_answers == 0


def test_an_error_in_the_middle_ends_the_stream_well_formed_and_the_connection_goes_on():
    with RunningServer(ScriptedEngine(fails_after=3)) as server, connect(server) as client:
        reader = Reader(client)
        for _ in range(2):
            client.sendall(request())
            found = contents(reader.response()[1])
            assert len(found) == 4 and found[-1]["error"]["code"] == 500
        assert server.state.admission.num_answers == 0


def test_the_failure_of_one_prompt_ends_the_others():
    class Engine(ScriptedEngine):
        async def generate(self, prompt: Any, params: Any, request_id: str, options: Any) -> AsyncIterator[Any]:
            num_outputs = 0
            async for output in super().generate(prompt, params, request_id, options):
                yield output
                num_outputs += 1
                if num_outputs == 4 and prompt.prompt_token_ids[0] == 1:
                    raise EngineGenerateError("it failed")

    with RunningServer(Engine()) as server, connect(server) as client:
        client.sendall(request(max_tokens=2000, prompt=[IDS, [1, 2]]))
        found = contents(Reader(client).response()[1])
        assert found[-1]["error"]["code"] == 500
        server.wait_until(lambda: not server.engine.live and not server.state.running)
        assert server.state.admission.num_answers == 0


def test_answers_of_several_prompts_come_side_by_side(server):
    with connect(server) as client:
        client.sendall(request(prompt=[IDS, [1, 2]], n=2, max_tokens=8, seed=3))
        found = contents(Reader(client).response()[1])
    order = [one["index"] for content in found for one in content["choices"]]
    assert set(order[:8]) == {0, 1, 2, 3}, "none waits for another's end"
    whole = httpx.post(server.url + PATH, json={"prompt": [IDS, [1, 2]], "n": 2, "max_tokens": 8, "seed": 3}).json()
    assert [text_of(found, index) for index in range(4)] == [one["text"] for one in whole["choices"]]


def test_a_comment_is_not_written_to_a_client_that_does_not_read(slow):
    with connect(slow, 4096) as client:
        client.sendall(request(max_tokens=1000))
        slow.wait_until(lambda: slow.engine.prompts and not slow.engine.live and is_paused(slow))
        (stream,) = slow.state.keep_alive._streams
        stream.write_comment(COMMENT)
        _, chunks = Reader(client).response()
        assert text_of(contents(chunks)) == expected(slow, IDS, 1000)
