"""CoreLink: the front-end's ends of the two sockets of one core process. Owns the sockets and their private directory.

Used by the clients of cores in other processes. The directory is only there until the core has connected; a core that
was restarted gets a link of its own, so nothing of a dead core is ever received.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import zmq

from quire.core.serial import MessageDecoder, MessageEncoder
from quire.core.wire import FromCore, ToCore
from quire.errors import EngineDeadError, MessageError
from quire.logger import get_logger

MAX_SOCKET_PATH = 100  # sockaddr_un holds 107 bytes
MAX_MESSAGE_BYTES = 1 << 31

logger = get_logger(__name__)


class CoreLink:
    """Bound sockets for one core.

    Attributes:
        directory: private (0700); holds the sockets' files until `unlink`.
        num_sent: messages sent.
    """

    def __init__(self) -> None:
        self.directory = _private_directory()
        self.num_sent = 0
        self._context = zmq.Context()
        self._inputs = self._bind(zmq.PUSH, "in")
        self._outputs = self._bind(zmq.PULL, "out")
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[FromCore] = MessageDecoder(FromCore)

    @property
    def input_address(self) -> str:
        """Where the core receives."""
        return f"ipc://{self.directory / 'in'}"

    @property
    def output_address(self) -> str:
        """Where the core sends."""
        return f"ipc://{self.directory / 'out'}"

    @property
    def fd(self) -> int:
        """Becomes readable when something may have come; after that, receive until there is nothing."""
        return int(self._outputs.get(zmq.FD))

    def wait_for_hello(self, timeout_s: float) -> bool:
        """Whether the core has connected both sockets within `timeout_s`; its first message is taken."""
        timeout_ms = int(1000 * timeout_s)
        if not self._outputs.poll(timeout_ms) or not self._inputs.poll(timeout_ms, zmq.POLLOUT):
            return False
        self._outputs.recv_multipart()
        return True

    def unlink(self) -> None:
        """Remove the directory: the connections stay, no other process can connect. Harmless when repeated."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def send(self, message: ToCore) -> None:
        """Send a message; never waits.

        Raises:
            EngineDeadError: the core is gone.
        """
        try:
            self._inputs.send_multipart(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError(f"the engine core cannot be reached: {error}") from None
        self.num_sent += 1

    def receive(self, timeout_s: float = 0.0) -> FromCore | None:
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
                logger.error("could not decode a message from the engine core: %s", error)

    def close(self) -> None:
        """Close the sockets; harmless when repeated."""
        self.unlink()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.bind(f"ipc://{self.directory / name}")
        return socket


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(str(directory)) <= MAX_SOCKET_PATH - 4:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
