"""The sockets of a core towards its front ends: the handshake, then requests in and outputs out.

Owned by `WireCore`, on its event loop. A core's name on a socket is its data parallel rank, as two bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from quire.errors import ConfigError, EngineDeadError, MessageError
from quire.hosts.engine_core.messages import (
    CORE_DEAD,
    MAX_PAYLOAD_BYTES,
    Addresses,
    CoreOutputs,
    CoreReady,
    HandshakeMetadata,
    decode,
    encode,
)
from quire.logger import get_logger

HELLO_TIMEOUT_S = 300.0
GONE_S = 10.0
"""Of a front end whose connection has ended; it does not come back under the same addresses."""
FAREWELL_MS = 2000
MAX_FRONT_ENDS = 256
WATCHED = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

logger = get_logger(__name__)


def identity_of(rank: int) -> bytes:
    """The name of a core."""
    return rank.to_bytes(2, "little")


class Handshake:
    """Says HELLO to the front end that listens at `address`, and READY when the core can serve.

    Args:
        address: tcp://HOST:PORT.
        rank: data parallel rank.
    """

    def __init__(self, address: str, rank: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity_of(rank))
        self._socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._address = address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{address} is not a valid address of a front end: {error}",
                hint="give --data-parallel-address and --data-parallel-rpc-port of the front end",
                field="data_parallel_address",
            ) from None

    async def hello(self, timeout_s: float = HELLO_TIMEOUT_S) -> Addresses:
        """Announce this core; returns where it is to connect to.

        Raises:
            EngineDeadError: no front end answers.
            MessageError: the answer is not one.
        """
        await self._socket.send(encode({"status": "HELLO", "local": True, "headless": True}))
        if not await self._socket.poll(int(1000 * timeout_s)):
            raise EngineDeadError(
                f"no front end answers at {self._address} for {timeout_s:.0f} s",
                hint="start the front end (vllm-rs serve ...), or correct --data-parallel-rpc-port",
            )
        answer: HandshakeMetadata = decode(await self._socket.recv(), HandshakeMetadata)
        addresses = answer.addresses
        if not 0 < len(addresses.inputs) == len(addresses.outputs) <= MAX_FRONT_ENDS:
            raise MessageError(
                f"{len(addresses.inputs)} input and {len(addresses.outputs)} output addresses are not those of "
                "front ends"
            )
        return addresses

    async def ready(self) -> None:
        """The core can serve, and has connected to the addresses."""
        await self._socket.send(encode({"status": "READY", "local": True, "headless": True}))

    def close(self) -> None:
        """Close the socket; what was sent still goes out."""
        self._socket.close()
        self._context.term()


class FrontEndLinks:
    """Connected sockets, a pair for each front end.

    Args:
        addresses: from the handshake.
        rank: data parallel rank.

    Raises:
        EngineDeadError: an address cannot be connected to.
    """

    def __init__(self, addresses: Addresses, rank: int = 0) -> None:
        self._context = zmq.Context()
        self._rank = rank
        try:
            self._inputs = [self._connect(zmq.DEALER, address) for address in addresses.inputs]
            self._outputs = [self._connect(zmq.PUSH, address) for address in addresses.outputs]
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EngineDeadError(f"the front end cannot be connected to: {error}") from None

    @property
    def num_clients(self) -> int:
        """Front ends."""
        return len(self._outputs)

    def announce(self, ready: CoreReady) -> None:
        """Tell each front end what this core is; it sends nothing before."""
        for socket in self._inputs:
            socket.send(encode(ready), zmq.NOBLOCK)

    async def receive(self, client: int) -> AsyncIterator[list[bytes]]:
        """Messages of a front end, in order."""
        socket = zmq.asyncio.Socket.from_socket(self._inputs[client])
        while True:
            yield await socket.recv_multipart()

    async def wait_until_gone(self, client: int, gone_s: float = GONE_S) -> None:
        """Return when there is no connection to a front end for `gone_s` seconds: it has ended, or never began."""
        events = zmq.asyncio.Socket.from_socket(self._inputs[client].get_monitor_socket(WATCHED))
        is_connected = False
        while True:
            if not is_connected and not await events.poll(int(1000 * gone_s)):
                return
            event = parse_monitor_message(await events.recv_multipart())
            is_connected = event["event"] != zmq.EVENT_DISCONNECTED

    def send(self, client: int, outputs: CoreOutputs) -> None:
        """Send to a front end; never waits. One that does not read loses nothing until it is gone."""
        self._try(lambda: self._outputs[client].send(encode(outputs), zmq.NOBLOCK))

    def send_dead(self) -> None:
        """Tell every front end that this core has stopped for good."""
        for socket in self._outputs:
            self._try(lambda socket=socket: socket.send(CORE_DEAD, zmq.NOBLOCK))  # type: ignore[misc]

    def close(self) -> None:
        """Close the sockets; what was sent goes out, as far as it is taken within two seconds."""
        for socket in self._inputs:
            socket.disable_monitor()
            socket.close(linger=0)
        self._context.destroy(linger=FAREWELL_MS)

    def _try(self, send: Callable[[], object]) -> None:
        try:
            send()
        except zmq.ZMQError as error:
            logger.error("a message to the front end was lost: %s", error)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, identity_of(self._rank))
            socket.get_monitor_socket(WATCHED)  # before the connection begins, so that no event is missed
        socket.connect(address)
        return socket
