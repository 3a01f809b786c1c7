"""RankLink: typed messages between two ranks over a proven connection, whose end says that the other rank has ended.

Used between the ranks of scripts (`executor.launched`). Owns the socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from quire.errors import CommunicationError
from quire.logger import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
NOTED_WAIT_S = 10.0
_SIZE = struct.Struct("<I")

T = TypeVar("T")


class RankLink:
    """One end. Messages are sent and received by one thread; another may watch its end.

    Args:
        peer: connected; taken over.
        rank: of the other end.
        kind: type of the messages that come, or a union of tagged types.
        where: the other process, for messages.
    """

    def __init__(self, peer: socket.socket, rank: int, kind: Any, where: str = "") -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.rank, self.where = rank, where
        self._socket = peer
        self._decoder = msgspec.msgpack.Decoder(kind)

    @property
    def gone(self) -> str:
        """What its end means."""
        return f"rank {self.rank}{self.where} has ended, or has closed its engine"

    def fileno(self) -> int:
        """Of the socket; -1 = closed."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """To the other rank.

        Raises:
            CommunicationError: it has ended.
        """
        data = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise CommunicationError(self.gone) from error

    def try_receive(self, timeout_s: float = 0.0) -> Any:
        """The next message; None = none has begun to come in time.

        Raises:
            CommunicationError: the other rank has ended, or sends what is not a message.
        """
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                return None
            (size,) = _SIZE.unpack(self._read(_SIZE.size))
            if size > MAX_MESSAGE_BYTES:
                raise CommunicationError(f"rank {self.rank} sends a message of {size} bytes")
            return self._decoder.decode(self._read(size))
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            is_closed = isinstance(error, OSError) or self._socket.fileno() < 0
            raise CommunicationError(self.gone if is_closed else f"rank {self.rank} sends {error}") from error

    def receive(self, kind: type[T], awaited: str, timeout_s: float) -> T:
        """The next message, which must be of this type.

        Args:
            awaited: what the other rank is to do, for messages: "rank 1 ...".

        Raises:
            CommunicationError: it has ended, or has not sent one in time.
        """
        waited_s = 0.0
        while True:
            message = self.try_receive(min(NOTED_WAIT_S, timeout_s - waited_s))
            if isinstance(message, kind):
                return message
            if message is not None:
                raise Unexpected(message)
            waited_s += NOTED_WAIT_S
            if waited_s >= timeout_s:
                raise CommunicationError(f"rank {self.rank}{self.where} did not {awaited} within {timeout_s:.0f} s")
            logger.warning("waiting for rank %d%s to %s: %.0f s", self.rank, self.where, awaited, waited_s)

    def close(self) -> None:
        """What was sent still arrives; harmless when repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __del__(self) -> None:
        self.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the connection was closed")
            data += part
        return bytes(data)


class Unexpected(Exception):
    """Another message came than the one that was awaited.

    Attributes:
        message: that one.
    """

    def __init__(self, message: Any) -> None:
        super().__init__(type(message).__name__)
        self.message = message


def watch_links(links: Sequence[RankLink], on_end: Callable[[int], None]) -> None:
    """Call `on_end`, from a thread of its own, with the index of the first of these that ends, on either side.

    Args:
        on_end: a method, whose object the thread does not keep.
    """
    if links:
        fds = {os.dup(link.fileno()): index for index, link in enumerate(links)}
        args = (fds, weakref.WeakMethod(on_end))
        threading.Thread(target=_watch, args=args, name="other ranks", daemon=True).start()


def _watch(fds: dict[int, int], on_end: Callable[[], Callable[[int], None] | None]) -> None:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLRDHUP)
    ended = poller.poll()[0][0]
    for fd in fds:
        os.close(fd)
    call = on_end()
    if call is not None:
        call(fds[ended])
