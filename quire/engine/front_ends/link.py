"""FrontEndLink: messages between a front end and the owner of the engine cores, over a pair of connected sockets.

Each process has one end. Its event loop writes and reads the socket itself, without a thread in between: a step costs a
front end one read. Owns the socket, and what it does not take yet. A core's link (`core_link`) is another kind, as a
core has no event loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from quire.core.serial import MAX_FRAMES, Frame, MessageDecoder, MessageEncoder
from quire.errors import EngineDeadError, MessageError
from quire.logger import get_logger

READ_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 1 << 31
MAX_PIECES = 512
"""Of one write; the kernel takes 1024."""
HEAD = struct.Struct("<IQ")
"""Number of frames, bytes of the first; then come the bytes of the others, and the frames."""
SIZE = struct.Struct("<Q")

logger = get_logger(__name__)

T = TypeVar("T")


class FrontEndLink(Generic[T]):
    """One end of a link.

    Args:
        end: connected.
        kind: type of the messages that come.
        peer: what the other process is, for messages to users.
    """

    def __init__(self, end: socket.socket, kind: Any, peer: str) -> None:
        end.setblocking(False)
        self._socket = end
        self._peer = peer
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)
        self._on_message: Callable[[T], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unread = bytearray()
        self._unsent = bytearray()
        self._is_closed = False

    def send(self, message: Any) -> None:
        """Send a message; never waits. What the socket does not take is sent by the loop, once there is one.

        Raises:
            EngineDeadError: the other process is gone.
        """
        if self._is_closed:
            raise EngineDeadError(f"the {self._peer} cannot be reached")
        pieces = _framed(self._encoder.encode(message))
        if self._unsent:
            self._unsent += b"".join(pieces)
            return
        num_sent = self._write(pieces)
        if num_sent < sum(map(len, pieces)):
            self._unsent += b"".join(pieces)[num_sent:]
            if self._loop is not None:
                self._loop.add_writer(self._socket, self._flush)

    def listen(self, on_message: Callable[[T], None]) -> None:
        """Call `on_message` on the running event loop with each message that comes; a malformed one is left out."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)

    def close(self) -> None:
        """Close the socket; harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._stop()
            self._socket.close()

    def _stop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)

    def _write(self, pieces: Sequence[Frame]) -> int:
        """Bytes that the socket took.

        Raises:
            EngineDeadError: the other process is gone.
        """
        try:
            return self._socket.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise EngineDeadError(f"the {self._peer} cannot be reached: {error}") from None

    def _flush(self) -> None:
        try:
            del self._unsent[: self._write([bytes(self._unsent[:READ_BYTES])])]
        except EngineDeadError:  # its end is noticed otherwise
            self._unsent.clear()
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        """Take what has come, up to a limit, so that others have their turn."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:  # the other process has ended, which is noticed otherwise
            self._stop()
            return
        self._unread += data
        try:
            while not self._is_closed and (frames := self._next()) is not None:
                self._deliver(frames)
        except MessageError as error:
            logger.error("the %s cannot be understood any more: %s", self._peer, error)
            self._stop()

    def _deliver(self, frames: Sequence[Frame]) -> None:
        assert self._on_message is not None, "`listen` was called"
        try:
            message = self._decoder.decode(frames)
        except MessageError as error:
            logger.error("could not decode a message from the %s: %s", self._peer, error)
            return
        try:
            self._on_message(message)
        except Exception:  # a mistake with one message must not keep those behind it
            logger.exception("a message from the %s could not be handled", self._peer)

    def _next(self) -> list[Frame] | None:
        """The frames of the next message, once it is there.

        Raises:
            MessageError: this is none.
        """
        unread = self._unread
        if len(unread) < HEAD.size:
            return None
        count, first = HEAD.unpack_from(unread)
        if not 0 < count <= MAX_FRAMES:
            raise MessageError(f"a message of {count} frames")
        start = HEAD.size + SIZE.size * (count - 1)
        if len(unread) < start:
            return None
        sizes = [first, *(SIZE.unpack_from(unread, HEAD.size + SIZE.size * one)[0] for one in range(count - 1))]
        end = start + sum(sizes)
        if end > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {end} bytes")
        if len(unread) < end:
            return None
        frames: list[Frame] = []
        for size in sizes:
            frames.append(bytes(unread[start : start + size]))
            start += size
        del unread[:end]
        return frames


def _framed(frames: Sequence[Frame]) -> list[Frame]:
    """What is written for a message."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = HEAD.pack(len(frames), sizes[0]) + b"".join(map(SIZE.pack, sizes[1:]))
    pieces = [head, *frames]
    return pieces if len(pieces) <= MAX_PIECES else [b"".join(pieces)]
