"""What a decode engine and a prefill engine say to each other, and the channel they say it on.

A message is a length and one msgpack value of a known type; nothing else is decoded, and none may be long. Blocks may
follow a message as bytes. A connection begins with a proof on both sides that the other has the same key (empty = none
is needed), and with both layouts: blocks of another one are never read. The key proves who speaks when a connection
begins; it does not encrypt.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from quire.errors import QuireError
from quire.utils.proofs import NONCE_BYTES, is_proof

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_NAMES = 4096
_LENGTH = struct.Struct("<I")

Text = Annotated[str, msgspec.Meta(max_length=512)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=32)]
Names = Annotated[list[Digest], msgspec.Meta(max_length=MAX_NAMES)]


class PeerError(QuireError):
    """The other engine said what it may not, or refused."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The prefill engine, first: prove that you have the key."""

    nonce: Nonce


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """The decode engine: who it is, and what its blocks are (`KVCacheLayout.to_json`)."""

    protocol: int
    engine_id: Text
    transport: Text
    layout: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
    nonce: Nonce
    proof: Digest


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The prefill engine: the same of it, and how its transport reaches its memory."""

    engine_id: Text
    layout: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
    transport: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    proof: Digest


class ReadBlocks(msgspec.Struct, frozen=True, tag="read"):
    """Blocks of a request's lease from `first` on, which are to have these names."""

    request_id: Text
    first: Number
    names: Names


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Their numbers, a checksum of each, and how many bytes of them follow (0 = the transport reads them)."""

    block_ids: Annotated[list[Number], msgspec.Meta(max_length=MAX_NAMES)]
    checksums: Names
    num_bytes: Number


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The blocks of a request may be freed."""

    request_id: Text


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Whether they were kept until now, so that what was read is theirs."""

    was_held: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why not."""

    reason: Text


Message = Challenge | Hello | Welcome | ReadBlocks | Blocks | Release | Released | Refused
Expected = TypeVar("Expected", Challenge, Hello, Welcome, Blocks, Released)


class Channel:
    """Messages over a connected socket.

    Args:
        sock: is closed with the channel.
        timeout_s: longest wait for one message, or for the bytes behind it, whatever the other side trickles.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self.timeout_s = timeout_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(self, message: Message, payload: Iterable[memoryview] = ()) -> None:
        """Send a message, and bytes behind it. Raises OSError."""
        body = msgspec.msgpack.encode(message)
        self._socket.settimeout(self.timeout_s)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)
        for part in payload:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(part)

    def receive(self, wait_s: float | None = None) -> Message:
        """The next message.

        Args:
            wait_s: longest wait until it begins; None = as for the rest of it.

        Raises:
            OSError: the connection is broken, or too slow.
            PeerError: it is not a message.
        """
        prefix = bytearray(_LENGTH.size)
        self.receive_into(memoryview(prefix), wait_s)
        (size,) = _LENGTH.unpack(prefix)
        if size > MAX_MESSAGE_BYTES:
            raise PeerError(f"a message of {size} bytes is longer than {MAX_MESSAGE_BYTES}")
        body = bytearray(size)
        self.receive_into(memoryview(body))
        try:
            message: Message = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"not a message: {error}") from None
        return message

    def expect(self, kind: type[Expected]) -> Expected:
        """The next message, of this type.

        Raises:
            OSError: as `receive`.
            PeerError: it is another one, or a refusal.
        """
        message = self.receive()
        if isinstance(message, Refused):
            raise PeerError(f"refused: {message.reason}")
        if not isinstance(message, kind):
            raise PeerError(f"a {kind.__name__} was expected, not a {type(message).__name__}")
        return message

    def receive_into(self, target: memoryview, wait_s: float | None = None) -> None:
        """Fill `target`. Raises OSError."""
        deadline = time.monotonic() + (self.timeout_s if wait_s is None else wait_s)
        while target:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other engine is too slow")
            self._socket.settimeout(left_s)
            size = self._socket.recv_into(target)
            if not size:
                raise ConnectionError("the other engine closed the connection")
            target = target[size:]

    def close(self) -> None:
        """End the connection; wakes a thread that waits for it, harmless when repeated."""
        with contextlib.suppress(OSError):  # it is not connected any longer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def check_proof(proof: bytes, key: bytes, side: str, challenge: bytes, nonce: bytes) -> None:
    """Refuse a side that has another key. Raises PeerError."""
    if not is_proof(proof, key, side, challenge, nonce):
        raise PeerError("the other engine has another key (key_file)")
