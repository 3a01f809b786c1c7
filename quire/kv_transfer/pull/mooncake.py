"""Mooncake's transfer engine as a transport: one-sided reads by `mooncake-transfer-engine`, over tcp or rdma.

The engine has its own port for data and no authentication: keep it in a trusted network. Its time limit of a transfer
is `MC_TRANSFER_TIMEOUT` (seconds), which is set here unless the environment says otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.pull.messages import Blocks, Channel, PeerError
from quire.kv_transfer.pull.transport import (
    CacheMemory,
    Reader,
    RemoteMemory,
    Transport,
    addresses_of,
    decode_memory,
    split,
)

TIMEOUT_S = 10
"""Longest time of one transfer."""


class MooncakeTransport(Transport):
    """Reads by a transfer engine of its own.

    Args:
        host: by which other engines reach it.
        protocol: "tcp" or "rdma".

    Raises:
        ConfigError: the package is not there, or the engine does not start.
    """

    name = "mooncake"

    def __init__(self, host: str, protocol: str) -> None:
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(TIMEOUT_S))
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                f"{FIELD}: MooncakeConnector needs the package mooncake-transfer-engine: {error}",
                hint="pip install mooncake-transfer-engine-non-cuda==0.3.13.post1, apt-get install libibverbs1",
                field=FIELD,
            ) from error  # fmt: skip
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise ConfigError(
                f"{FIELD}: Mooncake's transfer engine does not start at {host} with {protocol}",
                hint='its log says why; mooncake_protocol is "tcp" or "rdma"', field=FIELD,
            )  # fmt: skip
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._exposed: list[int] = []

    def expose(self, memory: CacheMemory) -> bytes:
        """As `Transport`."""
        addresses = addresses_of(memory, "Mooncake")
        for address, size in zip(addresses, memory.block_bytes, strict=True):
            if self._engine.register_memory(address, size * memory.num_blocks):
                raise ConfigError(f"{FIELD}: Mooncake cannot register the KV cache", field=FIELD)
            self._exposed.append(address)
        return RemoteMemory(self._name.encode(), addresses).encode()

    def connect(self, description: bytes, memory: CacheMemory) -> Reader:
        """As `Transport`."""
        return _MooncakeReader(self._engine, decode_memory(description, memory), memory)

    def close(self) -> None:
        """As `Transport`."""
        for address in self._exposed:
            self._engine.unregister_memory(address)
        self._exposed.clear()


class _MooncakeReader(Reader):
    def __init__(self, engine: Any, remote: RemoteMemory, memory: CacheMemory) -> None:
        self._engine = engine
        self._remote = remote
        self._memory = memory
        self._name = remote.agent.decode("ascii", "replace")
        self._arena = np.empty(memory.arena_bytes, dtype=np.uint8)
        self._address = self._arena.ctypes.data
        self._is_wedged = False
        if engine.register_memory(self._address, len(self._arena)):
            raise PeerError("Mooncake cannot register memory")

    def read(self, channel: Channel, blocks: Blocks) -> list[np.ndarray]:
        pieces = self._remote.pieces(blocks.block_ids, self._memory.block_bytes, self._address)
        there, here, sizes = (list(column) for column in zip(*pieces, strict=True))
        status = self._engine.batch_transfer_sync_read(self._name, here, there, sizes)
        if status:
            self._is_wedged = True
            _ABANDONED.append(self._arena)
            raise ConnectionError(f"Mooncake cannot read from {self._name}: {status}")
        return split(self._arena, len(blocks.block_ids), self._memory.block_bytes)

    def close(self) -> None:
        if not self._is_wedged:
            self._engine.unregister_memory(self._address)


_ABANDONED: list[np.ndarray] = []
"""Memory that a transfer which failed may still write to: it is never used for anything else."""
