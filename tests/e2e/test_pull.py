"""Prefill in one engine, decode in another, over TCP: the bytes of one engine, whatever becomes of the blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from quire.errors import ConfigError
from quire.kv_transfer.pull import link, server
from quire.kv_transfer.pull.leases import Leases
from quire.kv_transfer.pull.messages import Release
from tests.e2e.test_connector import BLOCK_SIZE, NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS, PROMPT, Core
from tests.unit.scheduler.harness import make_request

NUM_LOADED = NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}


def transfer(**more: Any) -> dict[str, Any]:
    extra = more.pop("extra", {})
    return {"kv_connector": "TCPConnector", "kv_port": 0, "kv_connector_extra_config": extra, **more}


class Pair:
    """A prefill and a decode engine that are stepped in turns."""

    def __init__(self, prefill: dict[str, Any], decode: dict[str, Any], **settings: Any) -> None:
        self.prefill = Core(kv_transfer_config=prefill, **settings)
        self.decode = Core(kv_transfer_config=decode, **settings)
        self.handle = 0
        self.counts: dict[str, float] = {}

    def ask_prefill(self, prompt: list[int] = PROMPT) -> dict[str, Any]:
        """`kv_transfer_params` of a prefill engine's response."""
        self.handle += 1
        core = self.prefill.core
        core.add_request(make_request(self.handle, prompt, max_tokens=1, extra_args={"kv_transfer_params": ASK}))
        ends: list[Any] = []
        while not ends:
            outputs = core.step()
            ends += [] if outputs is None else outputs.finished
        params = ends[0].kv_transfer_params
        assert params is not None
        return dict(params)

    def ask_decode(
        self, params: dict[str, Any] | None, prompt: list[int] = PROMPT
    ) -> tuple[list[int], list[bytes], int]:
        """As `Core.answer`, with the prefill engine running beside."""
        self.handle += 1
        before = self.decode.num_computed
        more = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        request = make_request(self.handle, prompt, max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, logprobs=3, **more)
        self.decode.core.add_request(dataclasses.replace(request, seed=7))
        outputs = []
        while self.decode.core.has_work():
            outputs += [one for one in [self.decode.core.step()] if one is not None]
            self.prefill.core.send_transfers()
        for one in outputs:
            for name, number in (one.stats.kv_connector or {}).items():
                self.counts[name] = self.counts.get(name, 0) + number
        assert self.decode.core.reset_prefix_cache(), "a block is lost"
        arrays = [one.logprobs.logprobs for one in outputs if one.logprobs is not None]
        logprobs = [array.tobytes() for array in arrays if array.size]
        tokens = [token for one in outputs for token in one.new_token_ids]
        return tokens, logprobs, self.decode.num_computed - before

    def close(self) -> None:
        for core in (self.prefill, self.decode):
            core.core.shutdown()


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], list[bytes], int]:
    plain = Core()
    answer = plain.answer(0)
    plain.core.shutdown()
    return answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("0123456789abcdef\n")
    extra = {"key_file": str(key)}
    pair = Pair(
        transfer(kv_role="kv_producer", engine_id="prefill", extra=extra),
        transfer(kv_role="kv_consumer", extra=extra),
    )
    yield pair
    pair.close()


def test_a_prompt_prefilled_by_one_engine_is_decoded_by_another_with_the_same_bytes(pair, expected):
    tokens, logprobs, num_computed = expected
    params = pair.ask_prefill()
    assert params["remote_num_tokens"] == NUM_LOADED and len(params["remote_block_ids"][0]) == 4
    again, again_logprobs, num_again = pair.ask_decode(params)
    assert again == tokens and again_logprobs == logprobs
    assert num_again == num_computed - NUM_LOADED
    assert pair.counts["loaded_blocks"] == 4 and pair.counts["read_bytes"] > 0
    assert not pair.prefill.core.has_work(), "the blocks are freed when they have been read"
    assert pair.ask_decode(params) == expected, "blocks that were released are not read again"
    assert pair.ask_decode(None) == expected


def test_what_cannot_be_loaded_is_computed_with_the_same_bytes(pair, expected, monkeypatch):
    params = pair.ask_prefill()
    wrong: list[dict[str, Any]] = [
        {"remote_engine_id": "another"},
        {"remote_layout": "0" * 64},
        {"remote_host": "192.0.2.1"},
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": 1},
        {"remote_num_tokens": "many"},
        {"remote_num_tokens": -1},
        {"tp_size": 2},
    ]
    for change in wrong:
        assert pair.ask_decode({**params, **change}) == expected, change
    monkeypatch.setattr(link, "IO_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert pair.ask_decode({**params, "remote_port": silent.getsockname()[1]}) == expected
    monkeypatch.undo()
    assert pair.counts["refused_params"] == 7 and pair.counts["failed_jobs"] >= 3
    more = pair.ask_decode({**params, "remote_num_tokens": 10**9})
    assert more[:2] == expected[:2] and more[2] < expected[2], "blocks behind the prompt's are not asked for"
    assert not pair.prefill.core.has_work()


def test_blocks_that_were_not_kept_until_they_were_read_do_not_count(pair, expected, monkeypatch):
    params = pair.ask_prefill()
    monkeypatch.setattr(Leases, "release", lambda *_: False)
    assert pair.ask_decode(params) == expected and pair.counts["expired_loads"] == 1
    monkeypatch.undo()
    assert pair.ask_decode(params)[2] < expected[2] and not pair.prefill.core.has_work()


def test_blocks_of_another_prompt_are_not_read(pair, expected, monkeypatch):
    monkeypatch.setattr(server, "OVERTAKEN_S", 0.01)
    params = pair.ask_prefill([token + 1 for token in PROMPT])
    assert pair.ask_decode(params) == expected
    assert pair.ask_decode({**params, "remote_request_id": "r0"}) == expected
    assert pair.prefill.core.has_work(), "they are kept for the decode engine that has their prompt"
    assert pair.ask_decode(params, [token + 1 for token in PROMPT])[2] == expected[2] - NUM_LOADED
    assert not pair.prefill.core.has_work()


def test_blocks_are_released_when_they_are_not_needed(pair):
    core = pair.decode.core
    for prompt, is_aborted in ((PROMPT[:BLOCK_SIZE], False), (PROMPT, True)):
        params = pair.ask_prefill(prompt)
        core.add_request(make_request(1000, prompt, max_tokens=1, extra_args={"kv_transfer_params": params}))
        if is_aborted:
            core.abort_requests([1000])
        while core.has_work() or pair.prefill.core.has_work():
            core.step()
            pair.prefill.core.step()
    assert core.reset_prefix_cache() and pair.prefill.core.reset_prefix_cache()


class Proxy:
    """Forwards one connection to `port`; of what comes back byte `at` is flipped, or is the last.

    Attributes:
        num_bytes: that came back.
    """

    def __init__(self, port: int, at: int = -1, *, cuts: bool = False) -> None:
        self.num_bytes = 0
        self._at, self._cuts = at, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it was closed before anybody came
            return
        threading.Thread(target=self._forward, args=(client, self._target, lambda data: data), daemon=True).start()
        self._forward(self._target, client, self._damage)

    def _damage(self, data: bytes) -> bytes:
        place = self._at - self.num_bytes
        self.num_bytes += len(data)
        if not 0 <= place < len(data):
            return data
        return data[:place] if self._cuts else data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]

    def _forward(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while (data := source.recv(65536)) and (changed := change(data)):
                target.sendall(changed)
        except OSError:
            pass
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()


def test_damaged_and_cut_connections_cost_a_computation_and_no_token(pair, expected, monkeypatch):
    params = pair.ask_prefill()
    with contextlib.closing(Proxy(params["remote_port"])) as proxy:
        assert pair.ask_decode({**params, "remote_port": proxy.port})[2] < expected[2]
    num_bytes, num_loaded = proxy.num_bytes, 0
    monkeypatch.setattr(link, "IO_TIMEOUT_S", 0.1)
    for number in range(8):
        params = pair.ask_prefill()
        at = number * (num_bytes - 1) // 7
        with contextlib.closing(Proxy(params["remote_port"], at, cuts=number % 3 == 2)) as proxy:
            answer = pair.ask_decode({**params, "remote_port": proxy.port})
        assert answer[:2] == expected[:2], (number, at)
        num_loaded += answer[2] < expected[2]
    assert num_loaded == 0, "a byte that is flipped anywhere is noticed"
    assert pair.counts["damaged_reads"] > 2


def test_a_policy_that_says_so_ends_the_request(expected):
    pair = Pair(transfer(engine_id="prefill"), transfer(kv_load_failure_policy="fail"))
    params = {**pair.ask_prefill(), "remote_port": 1}
    core = pair.decode.core
    core.add_request(make_request(1, PROMPT, max_tokens=4, extra_args={"kv_transfer_params": params}))
    ends: list[Any] = []
    while core.has_work():
        outputs = core.step()
        ends += [] if outputs is None else outputs.finished
    assert [end.finish_reason.name for end in ends] == ["ERROR"]
    pair.close()


def test_who_has_another_key_or_layout_is_refused(pair, expected):
    params = pair.ask_prefill()
    for more in ({}, {"kv_cache_dtype": "fp8"}):
        other = Core(kv_transfer_config=transfer(), **more)
        request = {**params, "remote_layout": ""}
        answer = other.answer(0, extra_args={"kv_transfer_params": request})
        assert answer[2] == expected[2] and (more or answer == expected)
        other.core.shutdown()
    assert pair.ask_decode(params)[2] < expected[2]


def test_what_is_not_the_protocol_harms_nobody(pair, expected):
    params = pair.ask_prefill()
    address = ("127.0.0.1", params["remote_port"])
    hello = msgspec.msgpack.encode(Release("r1"))
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"\x04\0\0\0\x93\x93\x93\x93",
        len(hello).to_bytes(4, "little") + hello,
    ):
        with contextlib.suppress(OSError), socket.create_connection(address) as sock:  # it may be reset at any time
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert pair.ask_decode(params)[:2] == expected[:2] and pair.counts["loaded_blocks"] >= 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease_s": 0}, "lease_s"),
        ({"max_leased_fraction": True}, "max_leased_fraction"),
        ({"allowed_hosts": "10.0.0.1"}, "allowed_hosts"),
        ({"key_file": "/nowhere"}, "key_file"),
        ({"advertised_host": "0.0.0.0"}, "advertised_host"),
        ({"lease": 3}, "did you mean 'lease_s'"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message):
        Core(kv_transfer_config=transfer(extra=extra))


def test_a_port_in_use_and_packages_that_are_not_there_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="kv_port"):
        Core(kv_transfer_config=transfer(kv_port=taken.getsockname()[1]))
    for name, package in (("NixlConnector", "nixl"), ("MooncakeConnector", "mooncake")):
        with pytest.raises(ConfigError, match=f"needs the package {package}"):
            Core(kv_transfer_config={"kv_connector": name, "kv_port": 0})
