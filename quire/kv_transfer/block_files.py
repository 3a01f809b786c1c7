"""Blocks as safetensors files in one directory, which several engines may share: the storage of `shared_files`.

    PATH/<32 digits of the layout's digest>/layout.json
    PATH/<32 digits of the layout's digest>/<64 digits: name of the block>.safetensors

A file is written beside its place and renamed, so that it is there whole or not at all. It says which block of which
layout it is, and has a checksum: what does not fit is never read into the cache. No state but the directory; used by
several threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError, QuireError
from quire.kv_transfer.layout import KVCacheLayout, layout_from_json

MAX_HEADER_BYTES = 1 << 20
CHECKSUM_BYTES = 16


class DamagedBlockError(QuireError):
    """A file is not the block that its name says."""


class SafetensorsFiles:
    """The files of blocks of one layout.

    Args:
        root: made if it is not there, readable by its owner alone.

    Raises:
        ConfigError: the directory cannot be used, or holds another layout under this one's name.
    """

    def __init__(self, root: Path, layout: KVCacheLayout) -> None:
        self._layout = layout
        self.directory = root / layout.digest[:32]
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            description = self.directory / "layout.json"
            if not description.exists():
                _write(description, [layout.to_json().encode()])
            layout.check_same(layout_from_json(description.read_bytes(), str(description)), str(self.directory))
        except OSError as error:
            raise ConfigError(
                f"shared_storage_path={str(root)!r} cannot be used: {error.strerror}",
                hint="give a directory that this process may write", field="kv_transfer_config",
            ) from None  # fmt: skip

    def num_first(self, names: Sequence[bytes]) -> int:
        """How many of these blocks are there, up to the first that is not."""
        for number, name in enumerate(names):
            if not self._path(name).exists():
                return number
        return len(names)

    def store(self, name: bytes, tensors: Sequence[np.ndarray]) -> None:
        """Write a block, unless it is there.

        Args:
            tensors: of the layout, uint8.
        """
        path = self._path(name)
        if path.exists():
            return
        parts = [np.ascontiguousarray(tensor).reshape(-1).data for tensor in tensors]
        header: dict[str, Any] = {"__metadata__": self._metadata(name, _checksum(parts))}
        end = 0
        for number, tensor in enumerate(tensors):
            begin, end = end, end + tensor.nbytes
            header[str(number)] = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        _write(path, [struct.pack("<Q", len(text)), text, *parts])

    def load(self, name: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """A block that was stored.

        Args:
            shapes: of the tensors, as they were stored.

        Raises:
            OSError: it is not there, or cannot be read.
            DamagedBlockError: it is not this block, or not whole.
        """
        sizes = [int(np.prod(shape)) for shape in shapes]
        with self._path(name).open("rb") as file:
            begin = file.read(8)
            num_header = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
            if not 0 < num_header <= MAX_HEADER_BYTES:
                raise DamagedBlockError(f"block {name.hex()[:16]}: the header is cut or too long")
            text = file.read(num_header)
            data = file.read(sum(sizes) + 1)
        if len(data) != sum(sizes):
            raise DamagedBlockError(f"block {name.hex()[:16]} has another size")
        expected = self._metadata(name, _checksum([memoryview(data)]))
        try:
            found = json.loads(text).get("__metadata__")
        except (ValueError, AttributeError, RecursionError):
            found = None
        if found != expected:
            raise DamagedBlockError(f"block {name.hex()[:16]} is damaged, or another block")
        arrays, start = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            arrays.append(np.frombuffer(bytearray(data[start : start + size]), dtype=np.uint8).reshape(shape))
            start += size
        return arrays

    def remove(self, name: bytes) -> None:
        """A damaged block is computed and stored again."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self.directory / f"{name.hex()}.safetensors"

    def _metadata(self, name: bytes, checksum: str) -> dict[str, str]:
        return {"block": name.hex(), "layout": self._layout.digest, "blake2b": checksum}


def _checksum(parts: Sequence[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file that is there whole or not at all, whatever other processes write it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with beside.open("xb") as file:
            for part in parts:
                file.write(part)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
