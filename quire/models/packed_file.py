"""One file of packed weights: its layout, written and read. Called by `packing_cache`; no state.

Layout: magic (8 bytes), format version (u32), bytes of the header (u32), SHA-256 of the header block, the header block
(JSON, zeros up to a page), then every tensor at the start of a page, zeros up to the next. All numbers little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from quire.errors import QuireError
from quire.kernels.native.memory import checksum
from quire.kernels.native.runtime import NativeRuntime

SUFFIX = ".packed"
MAGIC = b"QUIREPK\0"
FORMAT_VERSION = 1
PREFIX = struct.Struct("<8sII32s")
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 64 << 20
RUN_BYTES = 16 << 20  # what one thread reads at a time
DTYPES = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadEntryError(QuireError):
    """A file or directory that is not used.

    Attributes:
        is_damaged: the file is worth nothing to anyone, and may be removed.
    """

    def __init__(self, message: str, *, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies: bytes begin .. end - 1 of the file, and zeros up to `padded_end`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int

    @property
    def padded_end(self) -> int:
        return self.begin + _padded(self.end - self.begin)


def check_owner(status: os.stat_result, path: Path | str) -> None:
    """Refuse what another user could have written: one can be made to compute anything by changed weights.

    Raises:
        BadEntryError: it belongs to neither this user nor root, or others may write to it.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise BadEntryError(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise BadEntryError(f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o})")


def write_packed_file(file: BinaryIO, key: str, tensors: Mapping[str, torch.Tensor], runtime: NativeRuntime) -> None:
    """Write all of `tensors`, which are contiguous and on the CPU.

    Raises:
        BadEntryError: a tensor that the format cannot hold.
        OSError: the file cannot take it.
    """
    entries: dict[str, dict[str, Any]] = {}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise BadEntryError(f"tensor {name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}")
        num_bytes = tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "offset": position,
            "checksum": f"{checksum(runtime, tensor):016x}",
        }
        position += _padded(num_bytes)
    header = json.dumps({"key": key, "data_bytes": position, "tensors": entries}).encode()
    block = header.ljust(_padded(PREFIX.size + len(header)) - PREFIX.size, b"\0")
    file.write(PREFIX.pack(MAGIC, FORMAT_VERSION, len(block), hashlib.sha256(block).digest()))
    file.write(block)
    for tensor in tensors.values():
        num_bytes = tensor.numel() * tensor.itemsize
        if num_bytes:
            file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        file.write(bytes(_padded(num_bytes) - num_bytes))


def read_packed_file(
    file: int, key: str, runtime: NativeRuntime, into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of an open file, copied to memory, once every byte of the copy is known to be as written.

    Args:
        file: descriptor.
        runtime: as many threads as it has read at once; its pool computes checksums.
        into: contiguous CPU tensors to copy to, the very ones that the file must hold; after an error they may hold
            anything. None = new ones.

    Raises:
        BadEntryError: the file is not what `write_packed_file` made for `key`; says how.
        OSError: it cannot be read.

    Cost: one copy of the file, and one read of that copy.
    """
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise BadEntryError("it is not a regular file")
    check_owner(status, "it")
    header, data_start = _read_header(file, status.st_size, key)
    try:
        places, end = _find_places(header["tensors"], data_start, status.st_size)
        tensors = (
            {place.name: torch.empty(place.shape, dtype=place.dtype) for place in places} if into is None else into
        )
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as cause:
        raise BadEntryError(f"its header is malformed: {cause!r}", is_damaged=True) from cause
    if end != status.st_size:
        raise BadEntryError(f"it has {status.st_size} bytes, its tensors end at {end}", is_damaged=True)
    if [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()] != [
        (place.name, place.dtype, place.shape) for place in places
    ]:
        raise BadEntryError("its tensors are not those of this model")
    _read_data(file, places, tensors, runtime.num_threads)
    for place in places:
        if checksum(runtime, tensors[place.name]) != place.checksum:
            raise BadEntryError(f"tensor {place.name} has a wrong checksum", is_damaged=True)
        if any(os.pread(file, place.padded_end - place.end, place.end)):
            raise BadEntryError(f"bytes after tensor {place.name} are not zero", is_damaged=True)
    return dict(tensors)


def _read_header(file: int, file_size: int, key: str) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    prefix = os.pread(file, PREFIX.size, 0)
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise BadEntryError("it is not a file of packed weights", is_damaged=True)
    _, version, block_bytes, digest = PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise BadEntryError(f"its format is version {version}, this Quire reads version {FORMAT_VERSION}")
    data_start = PREFIX.size + block_bytes
    if data_start % PAGE_BYTES or block_bytes > MAX_HEADER_BYTES or data_start > file_size:
        raise BadEntryError(f"it has {file_size} bytes, its header claims {block_bytes}", is_damaged=True)
    block = os.pread(file, block_bytes, PREFIX.size)
    if hashlib.sha256(block).digest() != digest:
        raise BadEntryError("the checksum of its header is wrong", is_damaged=True)
    try:
        header: dict[str, Any] = json.loads(block.rstrip(b"\0"))
        expected = data_start + header["data_bytes"]
        given_key = header["key"]
    except (KeyError, TypeError, ValueError) as cause:
        raise BadEntryError(f"its header is malformed: {cause!r}", is_damaged=True) from cause
    if given_key != key:
        raise BadEntryError(f"it was written for key {given_key}", is_damaged=True)
    if expected != file_size:
        raise BadEntryError(f"it has {file_size} bytes, {expected} were written", is_damaged=True)
    return header, data_start


def _find_places(entries: dict[str, Any], data_start: int, file_size: int) -> tuple[list[_Place], int]:
    """Where the tensors lie, one behind the other, and where the last one ends."""
    places = []
    position = data_start
    for name, entry in entries.items():
        if data_start + entry["offset"] != position:
            raise BadEntryError(f"tensor {name} does not start where the previous tensor ends", is_damaged=True)
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        num_bytes = dtype.itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or num_bytes > file_size - position:
            raise ValueError(f"tensor {name} has shape {shape} in {file_size - position} bytes")
        place = _Place(name, dtype, shape, position, position + num_bytes, int(entry["checksum"], 16))
        places.append(place)
        position = place.padded_end
    return places, position


def _read_data(file: int, places: Sequence[_Place], tensors: Mapping[str, torch.Tensor], num_threads: int) -> None:
    """Copy every place to its tensor; threads share the work, most of which is the system's making of new pages."""
    runs = []
    for place in places:
        if place.end > place.begin:
            bytes_ = tensors[place.name].reshape(-1).view(torch.uint8).numpy().data
            starts = range(0, len(bytes_), RUN_BYTES)
            runs += [(bytes_[start : start + RUN_BYTES], place.begin + start) for start in starts]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-weights") as threads:
        for _ in threads.map(lambda run: _read_run(file, *run), runs):
            pass


def _read_run(file: int, buffer: memoryview, position: int) -> None:
    while len(buffer):
        num_read = os.preadv(file, [buffer], position)
        if num_read == 0:
            raise BadEntryError("it was truncated while being read", is_damaged=True)
        buffer, position = buffer[num_read:], position + num_read


def _padded(num_bytes: int) -> int:
    """Bytes up to the next page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
