"""PrefillServer: answers for a prefill engine, on threads of its own; no step waits for it.

Started by the worker's half of the connector. Another engine is given blocks of a lease whose names it knows, which are
names of their content: it cannot ask for blocks of a prompt that it does not have. Owns the sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.connector import BlockAccess
from quire.kv_transfer.layout import KVCacheLayout, layout_from_json
from quire.kv_transfer.pull.counts import Counts
from quire.kv_transfer.pull.leases import Leases
from quire.kv_transfer.pull.messages import (
    PROTOCOL,
    Blocks,
    Challenge,
    Channel,
    Hello,
    Message,
    PeerError,
    ReadBlocks,
    Refused,
    Release,
    Released,
    Welcome,
    check_proof,
)
from quire.kv_transfer.pull.transport import CacheMemory
from quire.logger import get_logger
from quire.utils.proofs import new_nonce, proof_of

logger = get_logger(__name__)

MAX_PEERS = 64
"""Connections at once."""
IO_TIMEOUT_S = 10.0
"""Longest wait within a message."""
IDLE_TIMEOUT_S = 300.0
"""Longest wait for the next request of a connection."""
RETRY_S = 0.1
OVERTAKEN_S = 2.0
"""Longest wait for a lease that begins with the next step."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is to others.

    Attributes:
        transport: its name; both engines have to use the same.
        key: what both have to have; empty = no key.
    """

    engine_id: str
    transport: str
    layout: KVCacheLayout
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class Served:
    """What is read: blocks by number, their memory, and how the transport reaches it.

    Attributes:
        is_inline: their bytes follow the messages.
    """

    blocks: BlockAccess
    memory: CacheMemory
    description: bytes
    is_inline: bool


def checksums_of(names: Sequence[bytes], tensors: Sequence[np.ndarray]) -> list[bytes]:
    """One for each block, of its name and its bytes in each tensor ([num_blocks, ...] uint8)."""
    digests = [hashlib.blake2b(name, digest_size=16) for name in names]
    for tensor in tensors:
        for digest, block in zip(digests, tensor, strict=True):
            digest.update(block.data)
    return [digest.digest() for digest in digests]


class PrefillServer:
    """Listens until it is closed.

    Args:
        address: host and port; port 0 = a free one.

    Attributes:
        port: on which it listens.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self, address: tuple[str, int], identity: Identity, leases: Leases, served: Served, counts: Counts
    ) -> None:
        self._identity = identity
        self._leases = leases
        self._served = served
        self._counts = counts
        self._channels: set[Channel] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family, backlog=MAX_PEERS)
        except OSError as error:
            raise ConfigError(
                f"{FIELD}: kv_ip={address[0]} kv_port={address[1]} cannot be used: {error.strerror}",
                hint="give another kv_port to each engine of a machine, or 0 for a free one", field=FIELD,
            ) from None  # fmt: skip
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="KV prefill server", daemon=True).start()

    def close(self) -> None:
        """Stop; harmless when repeated."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed or self._listener.fileno() < 0:
                    return
                time.sleep(RETRY_S)  # that connection is gone, or there is no file for it: then it comes again at once
                continue
            channel = Channel(sock, IO_TIMEOUT_S)
            with self._lock:
                may_come = not self._is_closed and len(self._channels) < MAX_PEERS
                if may_come:
                    self._channels.add(channel)
            if may_come:
                threading.Thread(target=self._serve, args=(channel,), name="KV peer", daemon=True).start()
            else:
                self._counts.add("refused_peers")
                channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            self._shake_hands(channel)
            while True:
                self._answer(channel, channel.receive(IDLE_TIMEOUT_S))
        except PeerError as error:
            self._counts.add("refused_peers")
            logger.warning("a decode engine was refused: %s", error.message)
            self._refuse(channel, error.message)
        except OSError:
            pass  # it has gone; its leases end by themselves
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _refuse(self, channel: Channel, reason: str) -> None:
        with contextlib.suppress(OSError):  # it does not listen
            channel.send(Refused(reason[:500]))

    def _shake_hands(self, channel: Channel) -> None:
        own, challenge = self._identity, new_nonce()
        channel.send(Challenge(challenge))
        hello = channel.expect(Hello)
        check_proof(hello.proof, own.key, "decode", challenge, hello.nonce)
        check_peer(own, hello.protocol, hello.transport, hello.layout)
        channel.send(
            Welcome(
                engine_id=own.engine_id, layout=own.layout.to_json(), transport=self._served.description,
                proof=proof_of(own.key, "prefill", challenge, hello.nonce),
            )
        )  # fmt: skip

    def _answer(self, channel: Channel, message: Message) -> None:
        if isinstance(message, ReadBlocks):
            self._send_blocks(channel, message)
        elif isinstance(message, Release):
            channel.send(Released(self._leases.release(message.request_id, OVERTAKEN_S)))
        else:
            raise PeerError(f"a {type(message).__name__} is not a question")

    def _send_blocks(self, channel: Channel, message: ReadBlocks) -> None:
        if len(message.names) > self._served.memory.chunk_size:
            raise PeerError(f"{len(message.names)} blocks at once are too many")
        block_ids = self._leases.block_ids(message.request_id, message.first, message.names, OVERTAKEN_S)
        if not block_ids:
            self._counts.add("refused_reads")
            channel.send(Refused(f"blocks of request {message.request_id[:64]} are not kept under these names"))
            return
        tensors = [np.ascontiguousarray(tensor) for tensor in self._served.blocks.read(block_ids)]
        checksums = checksums_of(message.names, tensors)
        parts = [tensor.reshape(-1).data for tensor in tensors] if self._served.is_inline else []
        channel.send(Blocks(block_ids, checksums, sum(part.nbytes for part in parts)), parts)
        self._counts.add("sent_blocks", len(block_ids))


def check_peer(own: Identity, protocol: int, transport: str, layout: str) -> None:
    """Refuse an engine whose blocks mean something else here. Raises PeerError, which names what differs."""
    if protocol != PROTOCOL:
        raise PeerError(f"protocol {protocol} there, {PROTOCOL} here")
    if transport != own.transport:
        raise PeerError(f"blocks travel by {transport} there, by {own.transport} here")
    try:
        own.layout.check_same(layout_from_json(layout, "the other engine"), "the other engine")
    except ConfigError as error:
        raise PeerError(error.message) from None
