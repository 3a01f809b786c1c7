"""What crosses between the engine core and its compile workers: length-prefixed msgpack. Values only."""

from __future__ import annotations

from typing import Protocol

import msgspec

MAX_MESSAGE_BYTES = 1 << 30
_PREFIX_BYTES = 8


class Stream(Protocol):
    """What messages are written to, and read from."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; fewer at the end alone."""

    def write(self, data: bytes, /) -> int:
        """All of `data`."""

    def flush(self) -> None:
        """Send what was written."""


class WorkerSetup(msgspec.Struct, frozen=True):
    """What a worker is started with.

    Attributes:
        tokenizer_path: directory of the tokenizer's files.
        vocab_size: width of the logits.
        eos_token_id: ends an answer.
        cpu_s: CPU time that one grammar may take, in seconds.
        memory_bytes: memory that one grammar may take.
        is_background: it takes only what processors leave idle.
    """

    tokenizer_path: str
    vocab_size: int
    eos_token_id: int
    cpu_s: float
    memory_bytes: int
    is_background: bool = False


class CompileResult(msgspec.Struct, frozen=True):
    """A compiled grammar, or why there is none.

    Attributes:
        error: what the library has against the grammar, or which limit it exceeds.
        died: how the process that compiled it ended, when it ended by itself.
        cpu_s: CPU time that it took.
    """

    compiled: bytes = b""
    error: str | None = None
    died: str | None = None
    cpu_s: float = 0.0


class ProbeResult(msgspec.Struct, frozen=True):
    """Follows a `CompileResult` without an error.

    Attributes:
        is_expensive: a few tokens took too much, so the engine core must not follow the grammar itself.
        cpu_s: CPU time that compiling and this took together.
    """

    is_expensive: bool = False
    cpu_s: float = 0.0


def write_message(stream: Stream, message: msgspec.Struct) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(_PREFIX_BYTES, "little") + data)
    stream.flush()


def read_message(stream: Stream) -> bytes | None:
    """The bytes of the next message; None when the other end is gone."""
    prefix = stream.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        return None
    size = int.from_bytes(prefix, "little")
    data = stream.read(size) if size <= MAX_MESSAGE_BYTES else b""
    return data if len(data) == size else None
