"""One safetensors file, read through a map once its header is checked (`safetensors_header`).

Called by `weights`. A `SafetensorsFile` owns its memory map and hands out tensors that point into it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.errors import WeightsError
from quire.models.safetensors_header import SafetensorsHeader

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
        header = SafetensorsHeader(path)
        self.path = path
        self.entries = {
            one.name: TensorEntry(one.name, DTYPES[one.dtype], one.shape, one.begin, one.end)
            for one in header.entries.values()
        }
        self._data_start = header.data_start
        try:
            with path.open("rb") as file:
                # A private map: writable to torch, but writes would never reach the file.
                self._map = mmap.mmap(file.fileno(), header.size, access=mmap.ACCESS_COPY)
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
