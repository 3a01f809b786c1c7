"""The header of a safetensors file, checked against the file before a byte of data is used. Loads no torch.

Called by `safetensors_file`, which reads the data, and by `quire inspect`, which does not.

Source: the safetensors format, "Format" section of its README: 8 bytes of header size, a JSON header, the data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.errors import WeightsError
from quire.models.json_file import parse_json_object, regular_file_size

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 8
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1,
}  # fmt: skip
DOWNLOAD_AGAIN = "the download is damaged or incomplete: download the file again"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """Where one tensor lies: bytes begin .. end - 1 of the data section; `dtype` is a key of `DTYPE_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsHeader:
    """A checked header.

    Attributes:
        size: of the file, in bytes.
        data_start: where the data section begins.
        entries: tensor name -> where it lies.

    Raises:
        WeightsError: the file is not exactly what its header says; names the file, the tensor and the fix.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = regular_file_size(path, WeightsError)
        try:
            with path.open("rb") as file:
                self.entries = self._read_header(file)
        except OSError as cause:
            raise WeightsError(f"cannot read {path}: {cause}", hint="check the file", field=path.name) from cause

    def _read_header(self, file: BinaryIO) -> dict[str, HeaderEntry]:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise self._error(f"has {self.size} bytes, too few for a header", DOWNLOAD_AGAIN)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > MAX_HEADER_BYTES:
            raise self._error(f"claims a header of {header_size} bytes", f"at most {MAX_HEADER_BYTES} bytes are read")
        if 8 + header_size > self.size:
            raise self._error(f"has {self.size} bytes, but its header needs {header_size}", DOWNLOAD_AGAIN)
        header = parse_json_object(file.read(header_size), self.path, WeightsError)
        self.data_start = 8 + header_size
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise self._error(f"claims {len(header)} tensors", f"at most {MAX_TENSORS} are read")
        entries = {name: self._entry(name, fields) for name, fields in header.items()}
        self._check_layout(entries)
        return entries

    def _entry(self, name: str, fields: object) -> HeaderEntry:
        if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
            raise self._error(f"tensor {name[:200]!r} lacks dtype, shape or data_offsets", DOWNLOAD_AGAIN)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            problem = f"tensor {name[:200]!r} has dtype {str(dtype)[:40]!r}, which Quire does not support"
            raise self._error(problem, f"known: {', '.join(DTYPE_BYTES)}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:200]!r} has shape {str(shape)[:80]}", DOWNLOAD_AGAIN)
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"tensor {name[:200]!r} has data_offsets {str(offsets)[:80]}", DOWNLOAD_AGAIN)
        return self._sized_entry(HeaderEntry(name, dtype, tuple(shape), offsets[0], offsets[1]))

    def _sized_entry(self, entry: HeaderEntry) -> HeaderEntry:
        """The entry, once its bytes are known to lie in the file and to be as many as its shape needs."""
        data_bytes = self.size - self.data_start
        if not entry.begin <= entry.end <= data_bytes:
            raise self._error(
                f"tensor {entry.name[:200]!r} lies at bytes {entry.begin} to {entry.end} of the data, which has "
                f"{data_bytes}",
                DOWNLOAD_AGAIN,
            )
        needed = DTYPE_BYTES[entry.dtype]
        for size in entry.shape:
            needed *= size
        if needed != entry.end - entry.begin:
            raise self._error(
                f"tensor {entry.name[:200]!r} of shape {list(entry.shape)} needs {needed} bytes, "
                f"its offsets give {entry.end - entry.begin}",
                DOWNLOAD_AGAIN,
            )
        return entry

    def _check_layout(self, entries: dict[str, HeaderEntry]) -> None:
        """The tensors must cover the data section exactly: no overlap, no hole, nothing behind them."""
        position = 0
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != position:
                kind = "overlaps the tensor before it" if entry.begin < position else "has a hole before it"
                raise self._error(f"tensor {entry.name[:200]!r} {kind} at byte {entry.begin}", DOWNLOAD_AGAIN)
            position = entry.end
        extra = self.size - self.data_start - position
        if extra:
            raise self._error(f"has {extra} bytes after its last tensor", DOWNLOAD_AGAIN)

    def _error(self, problem: str, hint: str) -> WeightsError:
        return WeightsError(f"{self.path} {problem}", hint=hint, field=self.path.name)


def _are_sizes(values: object) -> bool:
    """True for a list of integers in [0, 2**48]."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 48 for value in values
    )
