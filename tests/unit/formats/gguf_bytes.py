"""GGUF files byte by byte, right and wrong: for tests of the reader and its fuzzer. Needs no torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
F32, Q8_0, Q4_K = 0, 8, 12


def u32(value: int) -> bytes:
    """Four bytes."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Eight bytes."""
    return struct.pack("<Q", value)


def string(text: str | bytes, num_bytes: int | None = None) -> bytes:
    """A string; `num_bytes` is what it says to have."""
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data) if num_bytes is None else num_bytes) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key, its type and its value."""
    return string(key) + u32(kind) + value


def array(kind: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    """The value of an array; `count` is what it says to have."""
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


def text(key: str, value: str) -> bytes:
    """A pair with a string."""
    return pair(key, STRING, string(value))


def tensor(name: str | bytes, dimensions: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """An entry of the table of tensors; dimensions as in the file: the row's first."""
    return string(name) + u32(len(dimensions)) + b"".join(map(u64, dimensions)) + u32(kind) + u64(offset)


ARCHITECTURE = text("general.architecture", "llama")
TOKENS = pair("tokenizer.ggml.tokens", ARRAY, array(STRING, [string("a"), string("b"), string("é")]))
SCORES = pair("tokenizer.ggml.scores", ARRAY, array(FLOAT32, [struct.pack("<f", -1.5)] * 3))
BLOCKS = pair("llama.block_count", UINT32, u32(2))
ALIGNED = 32


@dataclass(frozen=True)
class Parts:
    """What a file is put together from; a count that is None is the right one."""

    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    pairs: tuple[bytes, ...] = (ARCHITECTURE, BLOCKS, TOKENS, SCORES)
    tensors: tuple[bytes, ...] = (tensor("a.weight", [4, 3]), tensor("b.weight", [32, 2], Q8_0, 64))
    num_pairs: int | None = None
    num_tensors: int | None = None
    data: bytes = bytes(64 + 68)
    alignment: int = ALIGNED

    def file(self) -> bytes:
        """All bytes."""
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.pairs) if self.num_pairs is None else self.num_pairs,
        )
        header = self.magic + self.version + u64(counts[0]) + u64(counts[1]) + b"".join(self.pairs + self.tensors)
        return header + bytes(-len(header) % self.alignment) + self.data
