"""NIXL as a transport: one-sided reads between agents of the `nixl` package (1.5), by UCX or another of its back-ends.

On loopback UCX is kept on loopback, unless the environment says which devices it uses. NIXL has no authentication of
its own: who gets an agent's metadata can read the cache. It is sent after the proof of `key_file` alone.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
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
from quire.logger import get_logger

logger = get_logger(__name__)

POLL_S = 0.0002
"""Pause between two looks at a transfer."""


class NixlTransport(Transport):
    """Reads by an agent of its own.

    Args:
        backends: of NIXL, for example ("UCX",).
        is_local: the engine listens on loopback alone.

    Raises:
        ConfigError: the package is not there, or has no such back-end.
    """

    name = "nixl"

    def __init__(self, backends: Sequence[str], *, is_local: bool) -> None:
        if is_local:
            os.environ.setdefault("UCX_TLS", "tcp,sm,self")
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"{FIELD}: NixlConnector needs the package nixl: {error}",
                hint="pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1", field=FIELD,
            ) from error  # fmt: skip
        try:
            self._agent: Any = nixl_agent(f"quire-{uuid.uuid4().hex}", nixl_agent_config(backends=list(backends)))
        except Exception as error:  # NIXL's exceptions have no base of their own
            raise ConfigError(
                f"{FIELD}: NIXL cannot be used with backends {', '.join(backends)}: {error}",
                hint='for example "backends": ["UCX"]', field=FIELD,
            ) from error  # fmt: skip
        self._registered: list[Any] = []

    def expose(self, memory: CacheMemory) -> bytes:
        """As `Transport`."""
        addresses = addresses_of(memory, "NIXL")
        sizes = [size * memory.num_blocks for size in memory.block_bytes]
        regions = [(address, size, 0, "") for address, size in zip(addresses, sizes, strict=True)]
        self._registered.append(self._agent.register_memory(regions, mem_type="DRAM"))
        return RemoteMemory(self._agent.get_agent_metadata(), addresses).encode()

    def connect(self, description: bytes, memory: CacheMemory) -> Reader:
        """As `Transport`."""
        return _NixlReader(self._agent, decode_memory(description, memory), memory)

    def close(self) -> None:
        """As `Transport`."""
        for region in self._registered:
            self._agent.deregister_memory(region)
        self._registered.clear()


class _NixlReader(Reader):
    def __init__(self, agent: Any, remote: RemoteMemory, memory: CacheMemory) -> None:
        self._agent = agent
        self._remote = remote
        self._memory = memory
        self._arena = np.empty(memory.arena_bytes, dtype=np.uint8)
        self._address = self._arena.ctypes.data
        self._is_wedged = False
        try:
            name = agent.add_remote_agent(remote.agent)
            self._name: str = name.decode() if isinstance(name, bytes) else name
            self._region = agent.register_memory([(self._address, len(self._arena), 0, "")], mem_type="DRAM")
        except Exception as error:  # as in `NixlTransport`
            raise PeerError(f"NIXL cannot reach the other engine: {error}") from error

    def read(self, channel: Channel, blocks: Blocks) -> list[np.ndarray]:
        pieces = self._remote.pieces(blocks.block_ids, self._memory.block_bytes, self._address)
        try:
            local = self._agent.get_xfer_descs([(here, size, 0) for _, here, size in pieces], mem_type="DRAM")
            remote = self._agent.get_xfer_descs([(there, size, 0) for there, _, size in pieces], mem_type="DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, self._name)
        except Exception as error:  # as in `NixlTransport`
            raise ConnectionError(f"NIXL cannot read: {error}") from error
        self._wait(handle, time.monotonic() + channel.timeout_s)
        return split(self._arena, len(blocks.block_ids), self._memory.block_bytes)

    def _wait(self, handle: Any, deadline: float) -> None:
        state = "ERR"
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # as in `NixlTransport`
            raise ConnectionError(f"NIXL cannot read: {error}") from error
        finally:
            self._release(handle, is_over=state != "PROC")
        if state != "DONE":
            raise ConnectionError("NIXL: the other engine does not answer" if state == "PROC" else f"NIXL: {state}")

    def _release(self, handle: Any, *, is_over: bool) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # as in `NixlTransport`
            logger.warning("NIXL did not end a transfer: %s", error)
            is_over = False
        if not is_over:
            self._is_wedged = True
            _ABANDONED.append(self._arena)

    def close(self) -> None:
        try:
            if not self._is_wedged:
                self._agent.deregister_memory(self._region)
            self._agent.remove_remote_agent(self._name)
        except Exception as error:  # as in `NixlTransport`
            logger.warning("NIXL did not forget another engine: %s", error)


_ABANDONED: list[np.ndarray] = []
"""Memory that a transfer which could not be ended may still write to: it is never used for anything else."""
