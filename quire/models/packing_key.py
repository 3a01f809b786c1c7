"""The key of packed weights: what they were made from, and how. Called by the loader; no state."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.formats.gguf_file import GGUFPart, is_gguf
from quire.models.packed_file import FORMAT_VERSION
from quire.models.safetensors_file import SafetensorsFile

SAMPLE_BYTES = 4096


def packing_key(weight_files: Sequence[Path], how: Mapping[str, str | int]) -> str:
    """64 hexadecimal digits that name one packing of one set of weights.

    A file counts by its name, size, time of change and header, and by samples of every tensor: its first, middle and
    last 4 KiB. Files are not read whole, which would take as long as packing them.

    Args:
        weight_files: safetensors files, checked by `SafetensorsFile`, or the parts of a GGUF file.
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
    header, tensors = _layout(path)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        _add(digest, path.name.encode())
        _add(digest, f"{status.st_size} {status.st_mtime_ns}".encode())
        _add(digest, os.pread(file, len(header), header.start))
        for begin, end in tensors:
            last = max(begin, end - SAMPLE_BYTES)
            for start in sorted({begin, (begin + last) // 2, last}):
                _add(digest, os.pread(file, min(SAMPLE_BYTES, end - start), start))
    finally:
        os.close(file)


def _layout(path: Path) -> tuple[range, list[tuple[int, int]]]:
    """The bytes of a file's header, and from where to where each tensor lies."""
    if is_gguf(path):
        places = GGUFPart(path).header.tensors.values()
        tensors = [(place.offset, place.offset + place.num_bytes) for place in places]
        return range(min((begin for begin, _ in tensors), default=0)), tensors
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
    start = 8 + header_size
    entries = SafetensorsFile(path).entries.values()
    return range(8, start), [(start + entry.begin, start + entry.end) for entry in entries]


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """With its length, so that no two sequences of parts run together."""
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)
