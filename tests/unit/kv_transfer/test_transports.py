"""NIXL and Mooncake as transports, against fakes of their Python contracts: which bytes are read, and failures."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kv_transfer.pull.messages import Blocks, PeerError
from quire.kv_transfer.pull.transport import CacheMemory, RemoteMemory, Transport, decode_memory

NUM_BLOCKS, SHAPES = 6, ((2, 3), (4,))


class NixlAgent:
    """One process, so addresses are addresses. `state` is what transfers come to."""

    state = "DONE"
    alive: ClassVar[dict[bytes, str]] = {}

    def __init__(self, name: str, config: Any) -> None:
        if config.backends != ["UCX"]:
            raise RuntimeError("no such backend")
        self.name, self.regions = name, []

    def register_memory(self, regions: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.regions += regions
        return regions

    def deregister_memory(self, regions: Any) -> None:
        for region in regions:
            self.regions.remove(region)

    def get_agent_metadata(self) -> bytes:
        self.alive[self.name.encode()] = self.name
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return self.alive[metadata].encode()

    def remove_remote_agent(self, name: str) -> None:
        assert isinstance(name, str)

    def get_xfer_descs(self, pieces: Any, mem_type: str) -> Any:
        return pieces

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str) -> Any:
        assert operation == "READ" and name in self.alive.values()
        return [local, remote]

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.state == "DONE":
            copy_pieces([(there[0], here[0], here[1]) for here, there in zip(*handle, strict=True)])
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        pass


class MooncakeEngine:
    status = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0 if (metadata, protocol) == ("P2PHANDSHAKE", "tcp") else -1

    def get_rpc_port(self) -> int:
        return 1234

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def batch_transfer_sync_read(self, name: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        assert name == "127.0.0.1:1234"
        if self.status == 0:
            copy_pieces(zip(there, here, sizes, strict=True))
        return self.status


def copy_pieces(pieces: Any) -> None:
    for there, here, size in pieces:
        ctypes.memmove(here, there, size)


class Waits:
    timeout_s = 0.05


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    api = types.ModuleType("nixl._api")
    api.nixl_agent = NixlAgent  # type: ignore[attr-defined]
    api.nixl_agent_config = lambda backends: types.SimpleNamespace(backends=backends)  # type: ignore[attr-defined]
    engine = types.ModuleType("mooncake.engine")
    engine.TransferEngine = MooncakeEngine  # type: ignore[attr-defined]
    modules = {"nixl": types.ModuleType("nixl"), "nixl._api": api, "mooncake": types.ModuleType("mooncake")}
    for name, module in {**modules, "mooncake.engine": engine}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "MC_TRANSFER_TIMEOUT", "MC_TCP_BIND_ADDRESS"):
        monkeypatch.setenv(name, "as given")


def make(name: str) -> Transport:
    from quire.kv_transfer.pull.mooncake import MooncakeTransport
    from quire.kv_transfer.pull.nixl import NixlTransport

    return NixlTransport(["UCX"], is_local=True) if name == "nixl" else MooncakeTransport("127.0.0.1", "tcp")


def memory_of(tensors: list[torch.Tensor]) -> CacheMemory:
    return CacheMemory(tensors, [tensor[0].numel() * tensor.itemsize for tensor in tensors])


def random_memory(seed: int) -> CacheMemory:
    numbers = torch.Generator().manual_seed(seed)
    return memory_of([torch.randn(NUM_BLOCKS, *shape, generator=numbers).bfloat16() for shape in SHAPES])


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_blocks_are_read_from_their_places_tensor_by_tensor(name, packages):
    theirs, own = random_memory(1), random_memory(2)
    prefill, decode = make(name), make(name)
    reader = decode.connect(prefill.expose(theirs), own)
    for ids in ([4, 0, 5], [1]):
        read = reader.read(Waits(), Blocks(ids, [], 0))  # type: ignore[arg-type]
        for part, tensor in zip(read, theirs.tensors, strict=True):
            assert np.array_equal(part, tensor[ids].view(torch.uint8).reshape(len(ids), -1).numpy())
    reader.close()
    for transport in (prefill, decode):
        transport.close()
        transport.close()


@pytest.mark.parametrize(("name", "state"), [("nixl", "ERR"), ("nixl", "PROC"), ("mooncake", -1)])
def test_a_transfer_that_fails_or_hangs_is_an_error_and_its_memory_is_not_used_again(
    name, state, packages, monkeypatch
):
    monkeypatch.setattr(NixlAgent, "state", state)
    monkeypatch.setattr(MooncakeEngine, "status", state)
    transport, memory = make(name), random_memory(1)
    reader = transport.connect(transport.expose(memory), memory)
    abandoned = sys.modules[type(reader).__module__]._ABANDONED  # type: ignore[attr-defined]
    num_abandoned = len(abandoned)
    with pytest.raises(ConnectionError):
        reader.read(Waits(), Blocks([1], [], 0))  # type: ignore[arg-type]
    assert len(abandoned) == num_abandoned + (state != "ERR")
    reader.close()


@pytest.mark.parametrize("description", [b"", b"\x90", RemoteMemory(b"x", [1]).encode(), b"\x92\xc4\x01x\x92\x01\xff"])
def test_what_does_not_describe_the_memory_is_refused(description):
    with pytest.raises(PeerError):
        decode_memory(description, random_memory(1))


def test_caches_in_pieces_and_wrong_settings_are_refused(packages):
    from quire.kv_transfer.pull.mooncake import MooncakeTransport
    from quire.kv_transfer.pull.nixl import NixlTransport

    scattered = memory_of([torch.zeros(4, NUM_BLOCKS, 2).movedim(1, 0)])
    for name in ("nixl", "mooncake"):
        with pytest.raises(ConfigError, match="in one piece"):
            make(name).expose(scattered)
    with pytest.raises(ConfigError, match="backends OBJ"):
        NixlTransport(["OBJ"], is_local=True)
    with pytest.raises(ConfigError, match="does not start"):
        MooncakeTransport("127.0.0.1", "efa")
    with pytest.raises(PeerError, match="cannot reach"):
        NixlTransport(["UCX"], is_local=True).connect(RemoteMemory(b"gone", [1, 2]).encode(), random_memory(1))
