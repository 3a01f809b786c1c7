"""One safetensors file: its header checked against the file before a byte of data is used, then read through a map.

Called by `weights`. A `SafetensorsFile` owns its memory map and hands out tensors that point into it.

Source: the safetensors format, "Format" section of its README: 8 bytes of header size, a JSON header, the data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from quire.errors import WeightsError
from quire.models.json_file import parse_json_object, regular_file_size

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DOWNLOAD_AGAIN = "the download is damaged or incomplete: download the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes begin .. end - 1 of the data section."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A checked file.

    Attributes:
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
                # A private map: writable to torch, but writes would never reach the file.
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except OSError as cause:
            raise WeightsError(f"cannot read {path}: {cause}", hint="check the file", field=path.name) from cause

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor `name`, pointing into the map, which lives as long as it does."""
        entry = self.entries[name]
        num_bytes = entry.end - entry.begin
        if num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        offset = self._data_start + entry.begin
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=num_bytes)
        if offset % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Give the memory that shows tensor `name` back to the system; who reads it again, reads the file again."""
        entry = self.entries[name]
        begin = -(-(self._data_start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (self._data_start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if num_bytes > 0:
            self._map.madvise(mmap.MADV_DONTNEED, begin, num_bytes)

    def _read_header(self, file: BinaryIO) -> dict[str, TensorEntry]:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise self._error(f"has {self.size} bytes, too few for a header", DOWNLOAD_AGAIN)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > MAX_HEADER_BYTES:
            raise self._error(f"claims a header of {header_size} bytes", f"at most {MAX_HEADER_BYTES} bytes are read")
        if 8 + header_size > self.size:
            raise self._error(f"has {self.size} bytes, but its header needs {header_size}", DOWNLOAD_AGAIN)
        header = parse_json_object(file.read(header_size), self.path, WeightsError)
        self._data_start = 8 + header_size
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise self._error(f"claims {len(header)} tensors", f"at most {MAX_TENSORS} are read")
        entries = {name: self._entry(name, fields) for name, fields in header.items()}
        self._check_layout(entries)
        return entries

    def _entry(self, name: str, fields: object) -> TensorEntry:
        if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
            raise self._error(f"tensor {name[:200]!r} lacks dtype, shape or data_offsets", DOWNLOAD_AGAIN)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            problem = f"tensor {name[:200]!r} has dtype {str(dtype)[:40]!r}, which Quire does not support"
            raise self._error(problem, f"known: {', '.join(DTYPES)}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:200]!r} has shape {str(shape)[:80]}", DOWNLOAD_AGAIN)
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"tensor {name[:200]!r} has data_offsets {str(offsets)[:80]}", DOWNLOAD_AGAIN)
        return self._sized_entry(TensorEntry(name, DTYPES[dtype], tuple(shape), offsets[0], offsets[1]))

    def _sized_entry(self, entry: TensorEntry) -> TensorEntry:
        """The entry, once its bytes are known to lie in the file and to be as many as its shape needs."""
        data_bytes = self.size - self._data_start
        if not entry.begin <= entry.end <= data_bytes:
            raise self._error(
                f"tensor {entry.name[:200]!r} lies at bytes {entry.begin} to {entry.end} of the data, which has "
                f"{data_bytes}",
                DOWNLOAD_AGAIN,
            )
        needed = entry.dtype.itemsize
        for size in entry.shape:
            needed *= size
        if needed != entry.end - entry.begin:
            raise self._error(
                f"tensor {entry.name[:200]!r} of shape {list(entry.shape)} needs {needed} bytes, "
                f"its offsets give {entry.end - entry.begin}",
                DOWNLOAD_AGAIN,
            )
        return entry

    def _check_layout(self, entries: dict[str, TensorEntry]) -> None:
        """The tensors must cover the data section exactly: no overlap, no hole, nothing behind them."""
        position = 0
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != position:
                kind = "overlaps the tensor before it" if entry.begin < position else "has a hole before it"
                raise self._error(f"tensor {entry.name[:200]!r} {kind} at byte {entry.begin}", DOWNLOAD_AGAIN)
            position = entry.end
        extra = self.size - self._data_start - position
        if extra:
            raise self._error(f"has {extra} bytes after its last tensor", DOWNLOAD_AGAIN)

    def _error(self, problem: str, hint: str) -> WeightsError:
        return WeightsError(f"{self.path} {problem}", hint=hint, field=self.path.name)


def _are_sizes(values: object) -> bool:
    """True for a list of integers in [0, 2**48]."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 48 for value in values
    )
