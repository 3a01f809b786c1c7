"""One file that holds one block: its layout, written and read. Called by `BlockFiles`; no state.

Layout: a header of 128 bytes (magic, format version, number of payload bytes, namespace, key, checksum), then the
payload. Numbers are little-endian. The checksum is BLAKE2b-256 over the header's other fields and the payload, so that
damage anywhere in the file is found, and so is a whole file in the place of another.

A file is written under a temporary name and renamed, so a process that is killed at any instruction leaves a whole file
or none. It is not flushed to the medium (`fsync`): after a power cut a file may be torn, which its checksum shows, and
the block is computed again. What a cache would lose by that is worth less than what flushing costs with every block.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import struct
from pathlib import Path

import numpy as np

from quire.kv_offload.faults import BlockFault, FaultKind

MAGIC = b"QUIREKV\0"
FORMAT_VERSION = 1
DIGEST_BYTES = 32
HEADER = struct.Struct("<8sI4xQ32s32s32s8x")
_COVERED = struct.Struct("<8sI4xQ32s32s")  # the header's fields before the checksum
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_numbers = itertools.count()


def write_block_file(path: Path, namespace: bytes, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
    """Create or replace the file of a block; its directory exists.

    Args:
        namespace, key: 32 bytes each.
        payload: [num_bytes] uint8.
        used_at_ns: time of the file, by which a later process sees in which order blocks were used.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    header = _header(namespace, key, payload)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{next(_numbers)}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(temporary, flags, 0o600)
    try:
        try:
            _write_all(file, header)
            _write_all(file, payload.data)
            os.utime(file, ns=(used_at_ns, used_at_ns))
        finally:
            os.close(file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_block_file(path: Path, namespace: bytes, key: bytes, payload: np.ndarray) -> None:
    """Read the file of a block; `payload` ([num_bytes] uint8) is what was written, or worth nothing after an error.

    Raises:
        BlockFault: it is not the file of this block, whole and undamaged; says how.
        OSError: it could not be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise BlockFault(FaultKind.NOT_A_BLOCK, "it is not a regular file")
        if status.st_size != HEADER.size + len(payload):
            raise BlockFault(FaultKind.WRONG_SIZE, f"{status.st_size} bytes, expected {HEADER.size + len(payload)}")
        header = bytearray(HEADER.size)
        _read_all(file, memoryview(header), 0)
        _read_all(file, payload.data, HEADER.size)
    finally:
        os.close(file)
    check_header(bytes(header), namespace, key, payload)


def check_header(header: bytes, namespace: bytes, key: bytes, payload: np.ndarray) -> None:
    """Raise `BlockFault` unless the header is that of this block with this payload ([num_bytes] uint8)."""
    magic, version, num_bytes, found_namespace, found_key, found = HEADER.unpack(header)
    if magic != MAGIC:
        raise BlockFault(FaultKind.NOT_A_BLOCK, "it does not begin like the file of a block")
    if version != FORMAT_VERSION:
        raise BlockFault(FaultKind.OTHER_VERSION, f"format version {version}, expected {FORMAT_VERSION}")
    if found_namespace != namespace or found_key != key:
        raise BlockFault(FaultKind.OTHER_BLOCK, "it is the file of another block")
    if num_bytes != len(payload):
        raise BlockFault(FaultKind.WRONG_SIZE, f"it claims {num_bytes} bytes, expected {len(payload)}")
    if header != _header(namespace, key, payload):
        raise BlockFault(FaultKind.WRONG_CHECKSUM, f"its checksum is not {found.hex()}")


def _header(namespace: bytes, key: bytes, payload: np.ndarray) -> bytes:
    assert len(namespace) == DIGEST_BYTES == len(key), "names are digests"
    covered = (MAGIC, FORMAT_VERSION, len(payload), namespace, key)
    digest = hashlib.blake2b(_COVERED.pack(*covered), digest_size=DIGEST_BYTES)
    digest.update(payload.data)
    return HEADER.pack(*covered, digest.digest())


def _write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while len(left):
        left = left[os.write(file, left) :]


def _read_all(file: int, buffer: memoryview, position: int) -> None:
    while len(buffer):
        num_read = os.preadv(file, [buffer], position)
        if num_read == 0:
            raise BlockFault(FaultKind.WRONG_SIZE, "it was truncated while being read")
        buffer, position = buffer[num_read:], position + num_read
