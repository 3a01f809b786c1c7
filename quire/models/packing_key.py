"""The key of packed weights: what they were made from, and how. Called by the loader; no state."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.models.packed_file import FORMAT_VERSION
from quire.models.safetensors_file import SafetensorsFile

SAMPLE_BYTES = 4096


def packing_key(weight_files: Sequence[Path], how: Mapping[str, str | int]) -> str:
    """64 hexadecimal digits that name one packing of one set of weights.

    A file counts by its name, size, time of change and header, and by samples of every tensor: its first, middle and
    last 4 KiB. Files are not read whole, which would take as long as packing them.

    Args:
        weight_files: safetensors files, checked by `SafetensorsFile`.
        how: whatever else the packed bytes depend on: version of the layout, tier's layout, quantization, dtype.

    Raises:
        WeightsError: a file that is malformed.
        OSError: a file that cannot be read.

    Cost: three small reads per tensor.
    """
    digest = hashlib.sha256()
    _add(digest, json.dumps({"format": FORMAT_VERSION, **how}, sort_keys=True).encode())
    for path in sorted(weight_files, key=lambda path: path.name):
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    entries = SafetensorsFile(path).entries
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        _add(digest, path.name.encode())
        _add(digest, f"{status.st_size} {status.st_mtime_ns}".encode())
        (header_size,) = struct.unpack("<Q", os.pread(file, 8, 0))
        _add(digest, os.pread(file, header_size, 8))
        data_start = 8 + header_size
        for entry in entries.values():
            begin, end = data_start + entry.begin, data_start + entry.end
            last = max(begin, end - SAMPLE_BYTES)
            for start in sorted({begin, (begin + last) // 2, last}):
                _add(digest, os.pread(file, min(SAMPLE_BYTES, end - start), start))
    finally:
        os.close(file)


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """With its length, so that no two sequences of parts run together."""
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)
