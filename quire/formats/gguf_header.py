"""The header of a GGUF file: metadata and a table of tensors, every number checked against the file before it is used.

Called by `gguf_file`. Reads the header once and front to back, without torch, in less than two seconds whatever the
file holds: counts and lengths are limited by what follows them and by `MAX_...`. Strings of arrays (vocabularies) are
found, not decoded. Holds no state.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import NoReturn, overload

import numpy as np
import numpy.typing as npt

from quire.errors import WeightsError
from quire.formats.block_formats import BLOCK_FORMATS_BY_NUMBER, OTHER_TYPES, BlockFormat, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 64 << 20
# Of all arrays of strings together; the largest vocabulary known has 262,144 strings, with about twice as many merges.
MAX_ARRAY_STRINGS = 1 << 21
DOWNLOAD_AGAIN = "the download is damaged or incomplete: download the file again"
ASK_FOR_ANOTHER = "use a file of another quantization, such as Q4_K_M or Q8_0"

STRING, ARRAY = 8, 9
# Number of a type -> its name and numpy's.
NUMBER_TYPES: Mapping[int, tuple[str, str]] = {
    0: ("uint8", "<u1"), 1: ("int8", "<i1"), 2: ("uint16", "<u2"), 3: ("int16", "<i2"), 4: ("uint32", "<u4"),
    5: ("int32", "<i4"), 6: ("float32", "<f4"), 7: ("bool", "<u1"), 10: ("uint64", "<u8"), 11: ("int64", "<i8"),
    12: ("float64", "<f8"),
}  # fmt: skip
BOOL = 7

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFStrings(Sequence[str]):
    """An array of strings, decoded when they are asked for.

    Args:
        buffer: the file.
        ends: [count] the byte behind each string.
        key: what the array is called, for messages.

    Raises:
        WeightsError: from reading, a string that is not UTF-8.
    """

    def __init__(self, buffer: mmap | bytes, first: int, ends: array[int], path: str, key: str) -> None:
        self._buffer, self._first, self._ends, self._path, self._key = buffer, first, ends, path, key

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        end = self._ends[index]
        number = index % len(self)
        return self._decode(number, self._buffer[(self._ends[number - 1] if number else self._first) + 8 : end])

    def __iter__(self) -> Iterator[str]:
        """All of them, from one copy of their bytes."""
        base = self._first
        data = self._buffer[base : self._ends[-1]] if self._ends else b""
        begin = 8
        for number, end in enumerate(self._ends):
            yield self._decode(number, data[begin : end - base])
            begin = end - base + 8

    def _decode(self, number: int, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise WeightsError(
                f"{self._path}: string {number} of {self._key} is not UTF-8", hint=DOWNLOAD_AGAIN, field=self._key
            ) from cause


Value = int | float | bool | str | npt.NDArray[np.generic] | GGUFStrings
"""A value of the metadata; arrays of numbers are read-only."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: as in torch: the file's dimensions the other way round; the last is that of the rows, which are stored
            in blocks.
        offset: first byte, from the beginning of the file.
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What one file says about itself.

    Attributes:
        metadata: key -> value, in the order of the file.
        tensors: name -> where it lies, in the order of the file.
    """

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_header(buffer: mmap | bytes, path: str) -> GGUFHeader:
    """The header of the file that `buffer` holds.

    Args:
        buffer: all of the file.
        path: for messages.

    Raises:
        WeightsError: the file is not exactly what its header says, or has a tensor of a type that is not supported;
            names the file, the field and the fix.
    """
    cursor = _Cursor(buffer, path)
    version = _read_version(cursor)
    num_tensors = cursor.count("tensor_count", MAX_TENSORS, least_bytes=8 + 4 + 8 + 4 + 8)
    num_keys = cursor.count("metadata_kv_count", MAX_KEYS, least_bytes=8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for number in range(num_keys):
        key = cursor.name(f"metadata key {number}")
        if key in metadata:
            cursor.fail(key, "appears more than once", DOWNLOAD_AGAIN)
        metadata[key] = cursor.value(key, cursor.u32(key))
    alignment = _alignment(cursor, metadata)
    infos: dict[str, tuple[BlockFormat, tuple[int, ...], int]] = {}
    for number in range(num_tensors):
        name = cursor.name(f"tensor {number}")
        if name in infos:
            cursor.fail(name, "appears more than once", DOWNLOAD_AGAIN)
        infos[name] = _read_tensor(cursor, name)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _placed(cursor, name, block_format, shape, data_start, offset, alignment)
        for name, (block_format, shape, offset) in infos.items()
    }
    _check_layout(cursor, tensors)
    return GGUFHeader(version, metadata, tensors)


class _Cursor:
    """A position in the file that only goes forward, and never past what may be a header."""

    def __init__(self, buffer: mmap | bytes, path: str) -> None:
        self.buffer, self.path = buffer, path
        self.size = len(buffer)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.num_strings = 0

    def fail(self, field: str, problem: str, hint: str) -> NoReturn:
        raise WeightsError(f"{self.path}: {field[:200]} {problem}", hint=hint, field=field[:200])

    def take(self, num_bytes: int, field: str) -> int:
        """The position of the next `num_bytes`, which lie behind the cursor now."""
        begin = self.position
        if num_bytes > self.end - begin:
            if num_bytes <= self.size - begin:
                self.fail(field, f"ends beyond byte {MAX_HEADER_BYTES}", "no header that large is read")
            self.fail(
                field, f"needs {num_bytes} bytes at byte {begin}, the file has {self.size - begin}", DOWNLOAD_AGAIN
            )
        self.position = begin + num_bytes
        return begin

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, field))[0]
        return value

    def count(self, field: str, most: int, least_bytes: int) -> int:
        """A number of things that follow, of which each takes at least some bytes."""
        value = self.u64(field)
        if value > most:
            self.fail(field, f"is {value}", f"at most {most} are read; {DOWNLOAD_AGAIN}")
        if value * least_bytes > self.size - self.position:
            problem = f"is {value}, but only {self.size - self.position} bytes follow"
            self.fail(field, problem, DOWNLOAD_AGAIN)
        return value

    def string(self, field: str, most: int) -> str:
        num_bytes = self.u64(field)
        if num_bytes > most:
            self.fail(field, f"has a string of {num_bytes} bytes", f"at most {most} are read; {DOWNLOAD_AGAIN}")
        begin = self.take(num_bytes, field)
        try:
            return self.buffer[begin : self.position].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(field, "is not UTF-8", DOWNLOAD_AGAIN)

    def name(self, field: str) -> str:
        """A key or the name of a tensor."""
        name = self.string(field, MAX_NAME_BYTES)
        if not name.isprintable() or not name:
            self.fail(field, f"is called {name[:80]!r}", DOWNLOAD_AGAIN)
        return name

    def value(self, key: str, kind: int) -> Value:
        if kind == STRING:
            return self.string(key, MAX_STRING_BYTES)
        if kind == ARRAY:
            return self.array(key)
        values = self.numbers(key, kind, 1)
        value: int | float | bool = values[0].item()
        return value

    def array(self, key: str) -> npt.NDArray[np.generic] | GGUFStrings:
        kind = self.u32(key)
        if kind == ARRAY:
            self.fail(key, "is an array of arrays", "no model needs one; remove the key or download another file")
        if kind == STRING:
            return self.strings(key)
        num_bytes = np.dtype(NUMBER_TYPES[kind][1]).itemsize if kind in NUMBER_TYPES else 1
        return self.numbers(key, kind, self.count(key, MAX_HEADER_BYTES, num_bytes))

    def numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in NUMBER_TYPES:
            self.fail(key, f"has values of type {kind}, which is not defined", DOWNLOAD_AGAIN)
        dtype = np.dtype(NUMBER_TYPES[kind][1])
        begin = self.take(count * dtype.itemsize, key)
        values: npt.NDArray[np.generic] = np.frombuffer(self.buffer, dtype, count, begin).copy()
        if kind == BOOL:
            if values.size and int(values.max()) > 1:
                self.fail(key, f"has a truth value of {int(values.max())}", DOWNLOAD_AGAIN)
            values = values.astype(np.bool_)
        values.flags.writeable = False
        return values

    def strings(self, key: str) -> GGUFStrings:
        """Where each string ends: one step per string, since each length is behind the string before."""
        count = self.count(key, MAX_ARRAY_STRINGS, 8)
        self.num_strings += count
        if self.num_strings > MAX_ARRAY_STRINGS:
            problem = f"brings the strings of all arrays to {self.num_strings}"
            self.fail(key, problem, f"at most {MAX_ARRAY_STRINGS} are read; {DOWNLOAD_AGAIN}")
        first, position, last = self.position, self.position, self.end - 8
        ends: array[int] = array("q")
        unpack, append, buffer = _U64.unpack_from, ends.append, self.buffer
        for number in range(count):
            if position > last:
                self.fail(key, f"ends within string {number} of {count}", DOWNLOAD_AGAIN)
            position += 8 + unpack(buffer, position)[0]
            if position > self.end:
                problem = f"says that string {number} of {count} ends at byte {position}, beyond byte {self.end}"
                self.fail(key, problem, DOWNLOAD_AGAIN)
            append(position)
        self.position = position
        return GGUFStrings(buffer, first, ends, self.path, key)


def _read_version(cursor: _Cursor) -> int:
    if cursor.size < 24:
        cursor.fail("header", f"needs 24 bytes, the file has {cursor.size}", DOWNLOAD_AGAIN)
    magic = bytes(cursor.buffer[: len(MAGIC)])
    if magic != MAGIC:
        cursor.fail("magic", f"is {magic!r}, not {MAGIC!r}", "this is not a GGUF file; download the file again")
    cursor.take(len(MAGIC), "magic")
    version = cursor.u32("version")
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        hint = "convert the model anew with a current converter; versions 2 and 3 are read"
        if is_swapped:
            hint = "the file is big-endian; use the little-endian one"
        cursor.fail("version", f"is {version}", hint)
    return version


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        shown = repr(value)[:40]
        cursor.fail("general.alignment", f"is {shown}", f"it must be a power of two, at most {MAX_ALIGNMENT}")
    return value


def _read_tensor(cursor: _Cursor, name: str) -> tuple[BlockFormat, tuple[int, ...], int]:
    """Format, shape and offset within the data."""
    num_dimensions = cursor.u32(name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        cursor.fail(name, f"has {num_dimensions} dimensions", f"1 to {MAX_DIMENSIONS} are read; {DOWNLOAD_AGAIN}")
    shape = tuple(cursor.u64(name) for _ in range(num_dimensions))[::-1]
    number = cursor.u32(name)
    block_format = BLOCK_FORMATS_BY_NUMBER.get(number)
    if block_format is None:
        if number not in OTHER_TYPES:
            cursor.fail(name, f"is of type {number}, which is not defined", DOWNLOAD_AGAIN)
        cursor.fail(name, f"is of type {type_name(number)}, which Quire does not support", ASK_FOR_ANOTHER)
    return block_format, shape, cursor.u64(name)


def _placed(
    cursor: _Cursor,
    name: str,
    block_format: BlockFormat,
    shape: tuple[int, ...],
    data_start: int,
    offset: int,
    alignment: int,
) -> GGUFTensor:
    """The tensor, once its bytes are known to lie in the file."""
    data_bytes = max(0, cursor.size - data_start)
    if min(shape) < 1 or max(shape) > cursor.size * block_format.block_size:
        cursor.fail(name, f"has shape {list(shape)}, more than the file holds", DOWNLOAD_AGAIN)
    if shape[-1] % block_format.block_size:
        problem = f"has rows of {shape[-1]} numbers, in blocks of {block_format.block_size} ({block_format.name})"
        cursor.fail(name, problem, DOWNLOAD_AGAIN)
    num_bytes = block_format.row_bytes(shape[-1])
    for size in shape[:-1]:
        num_bytes *= size
    if offset % alignment:
        cursor.fail(name, f"begins at byte {offset} of the data", f"it must be a multiple of {alignment}")
    if offset + num_bytes > data_bytes:
        problem = f"lies at bytes {offset} to {offset + num_bytes} of the data, which has {data_bytes}"
        cursor.fail(name, problem, DOWNLOAD_AGAIN)
    return GGUFTensor(name, block_format, shape, data_start + offset, num_bytes)


def _check_layout(cursor: _Cursor, tensors: Mapping[str, GGUFTensor]) -> None:
    """No two tensors share a byte. Holes are allowed: they are padding."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            cursor.fail(tensor.name, f"overlaps {before[:200]}", DOWNLOAD_AGAIN)
        end, before = tensor.offset + tensor.num_bytes, tensor.name
