"""Links between two processes: a socket for each direction. Owns the sockets and, at one end, their private directory.

`CoreLink` is the front-end's end of the link to one core process, used by the clients of cores in other processes. The
directory is only there until the other process has connected; one that was restarted gets a link of its own, so nothing
of a dead process is ever received.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from quire.core.serial import MessageDecoder, MessageEncoder
from quire.core.wire import FromCore
from quire.errors import EngineDeadError, MessageError
from quire.logger import get_logger

HELLO = b"hello"
MAX_SOCKET_PATH = 100  # sockaddr_un holds 107 bytes
MAX_MESSAGE_BYTES = 1 << 31

logger = get_logger(__name__)


T = TypeVar("T")


class LinkEnd(Generic[T]):
    """One end of a link.

    Args:
        context: of both sockets.
        inputs: PUSH, what the other process takes in.
        outputs: PULL, what it puts out.
        kind: type of the messages that come.
        peer: what the other process is, for messages to users.

    Attributes:
        num_sent: messages sent.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], inputs: zmq.Socket[bytes], outputs: zmq.Socket[bytes],
        kind: Any, peer: str,
    ) -> None:  # fmt: skip
        self.num_sent = 0
        self._context = context
        self._inputs, self._outputs = inputs, outputs
        self._peer = peer
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)

    @classmethod
    def connected(cls, input_address: str, output_address: str, kind: Any, peer: str) -> LinkEnd[T]:
        """The end of a process that got the addresses of a `BoundLink`: what this one takes in, and puts out."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sends, receives = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        _unbounded(sends, receives)
        receives.connect(input_address)
        sends.connect(output_address)
        return cls(context, sends, receives, kind, peer)

    @property
    def fd(self) -> int:
        """Becomes readable when something may have come; after that, receive until there is nothing."""
        return int(self._outputs.get(zmq.FD))

    def send(self, message: Any) -> None:
        """Send a message; never waits.

        Raises:
            EngineDeadError: the other process is gone.
        """
        try:
            self._inputs.send_multipart(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError(f"the {self._peer} cannot be reached: {error}") from None
        self.num_sent += 1

    def receive(self, timeout_s: float = 0.0) -> T | None:
        """The next message, None when none comes in time. A malformed one is logged and left out."""
        while True:
            if timeout_s and not self._outputs.poll(int(1000 * timeout_s)):
                return None
            try:
                frames = self._outputs.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._decoder.decode(frames)
            except MessageError as error:
                logger.error("could not decode a message from the %s: %s", self._peer, error)

    def greet(self) -> None:
        """Let a `BoundLink` know that both sockets are connected."""
        self._inputs.send(HELLO)

    def close(self) -> None:
        """Close the sockets; harmless when repeated."""
        self._context.destroy(linger=0)


class BoundLink(LinkEnd[T]):
    """The end of the process that starts the other one.

    Args:
        kind, peer: as `LinkEnd`.

    Attributes:
        directory: private (0700); holds the sockets' files until `unlink`.
    """

    def __init__(self, kind: Any, peer: str) -> None:
        self.directory = _private_directory()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inputs, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        _unbounded(inputs, outputs)
        for socket, name in ((inputs, "in"), (outputs, "out")):
            socket.bind(f"ipc://{self.directory / name}")
        super().__init__(context, inputs, outputs, kind, peer)

    @property
    def input_address(self) -> str:
        """Where the other process receives."""
        return f"ipc://{self.directory / 'in'}"

    @property
    def output_address(self) -> str:
        """Where it sends."""
        return f"ipc://{self.directory / 'out'}"

    def wait_for_hello(self, timeout_s: float) -> bool:
        """Whether the other process has connected both sockets within `timeout_s`; its first message is taken."""
        timeout_ms = int(1000 * timeout_s)
        if not self._outputs.poll(timeout_ms) or not self._inputs.poll(timeout_ms, zmq.POLLOUT):
            return False
        self._outputs.recv_multipart()
        return True

    def unlink(self) -> None:
        """Remove the directory: the connections stay, no other process can connect. Harmless when repeated."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close the sockets; harmless when repeated."""
        self.unlink()
        super().close()


class CoreLink(BoundLink[FromCore]):
    """Bound sockets for one core."""

    def __init__(self) -> None:
        super().__init__(FromCore, "engine core")


def _unbounded(sends: zmq.Socket[bytes], receives: zmq.Socket[bytes]) -> None:
    """Neither drops a message, or waits with one; a message has a size that a process can hold."""
    for socket, limit in ((sends, zmq.SNDHWM), (receives, zmq.RCVHWM)):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(limit, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(str(directory)) <= MAX_SOCKET_PATH - 4:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
