"""A GGUF model on disk: one file or the parts of a split one, memory-mapped, with what their headers say.

Called by the tokenizer, by commands that look at files, and by `models.gguf_checkpoint`. A `GGUFFile` owns its memory
maps, and hands out bytes that point into them. No torch.

Source: the GGUF specification (ggml, docs/gguf.md); split files as written by llama.cpp's gguf-split.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quire.errors import ModelError, WeightsError
from quire.formats.gguf_header import DOWNLOAD_AGAIN, GGUFHeader, GGUFTensor, Value, read_header

SUFFIX = ".gguf"
PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
MAX_PARTS = 1024
# Projectors of images, which belong to a model and are none.
PROJECTOR_NAME = re.compile(r"mmproj", re.IGNORECASE)
# A pipe does not block.
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class GGUFPart:
    """One checked file.

    Raises:
        WeightsError: it cannot be read, or is not exactly what its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = os.open(path, OPEN_FLAGS)
        except OSError as cause:
            raise self._error(f"cannot be read: {cause.strerror}", "check that the download is complete") from cause
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise self._error("is not a regular file", "replace it by the file itself")
            self.size = status.st_size
            if not self.size:
                raise self._error("is empty", DOWNLOAD_AGAIN)
            # A private map: writable to torch, but writes would never reach the file.
            self._map = mmap.mmap(file, self.size, access=mmap.ACCESS_COPY)
        except OSError as cause:
            raise self._error(f"cannot be mapped: {cause.strerror}", "check the file") from cause
        finally:
            os.close(file)
        self.header: GGUFHeader = read_header(self._map, str(path))

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The bytes of a tensor of this file, which point into the map."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self, tensor: GGUFTensor) -> None:
        """Give the memory that shows a tensor back to the system; who reads it again, reads the file again."""
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = (tensor.offset + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if num_bytes > 0:
            self._map.madvise(mmap.MADV_DONTNEED, begin, num_bytes)

    def _error(self, problem: str, hint: str) -> WeightsError:
        return WeightsError(f"{self.path} {problem}", hint=hint, field=self.path.name)


class GGUFFile:
    """A model's file, or all parts of one that was split.

    Attributes:
        parts: in order; one where the file is not split.
        metadata: key -> value, of the first part. Arrays of numbers are NumPy's, arrays of strings `GGUFStrings`.
        tensors: name -> where it lies in its part.
        size: bytes of all parts.

    Args:
        path: the file, or any part of a split one.

    Raises:
        WeightsError: a file is missing, malformed or has a tensor of a type that is not supported; names the file, the
            field and the fix.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.parts = _open_parts(self.path)
        self.metadata: Mapping[str, Value] = self.parts[0].header.metadata
        self._part_of = _owners(self.parts)
        self.tensors: Mapping[str, GGUFTensor] = {
            name: part.header.tensors[name] for name, part in self._part_of.items()
        }
        self.size = sum(part.size for part in self.parts)
        _check_tensor_count(self.parts, len(self.tensors))

    def part_of(self, name: str) -> GGUFPart:
        """The part that has tensor `name`."""
        return self._part_of[name]

    def data(self, name: str) -> memoryview:
        """The bytes of tensor `name`, which point into a map that lives as long as they do."""
        return self._part_of[name].data(self.tensors[name])

    def release(self, name: str) -> None:
        """Give the memory that shows tensor `name` back to the system."""
        self._part_of[name].release(self.tensors[name])


def is_gguf(path: Path) -> bool:
    """Whether a path is called as a GGUF file is."""
    return path.suffix.lower() == SUFFIX


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory, the first part where it is split; None when there is none.

    Raises:
        ModelError: several models or quantizations lie there.
    """
    models = gguf_models(path for path in sorted(directory.iterdir()) if is_gguf(path))
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:8]) + (", ..." if len(models) > 8 else "")
        raise ModelError(
            f"{directory} has {len(models)} GGUF models: {names}",
            hint=f"name one of them: {models[0]}",
            field="model",
        )
    return models[0] if models else None


def gguf_models(paths: Iterable[Path]) -> list[Path]:
    """Those of the GGUF files that are models of their own: first parts, and no projectors of images."""
    found = []
    for path in paths:
        part = PART_NAME.fullmatch(path.name)
        if not PROJECTOR_NAME.search(path.name) and (part is None or int(part["number"]) == 1):
            found.append(path)
    return found


def part_paths(path: Path) -> list[Path]:
    """All parts of the model that the file `path` belongs to, by its name; itself where that is not of a part."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise WeightsError(
            f"{path} is called as part {int(match['number'])} of {count}",
            hint=f"parts are numbered from 1, and at most {MAX_PARTS} are read",
            field=path.name,
        )
    suffix = path.name[-len(SUFFIX) :]
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}{suffix}") for number in range(1, count + 1)]


def _open_parts(path: Path) -> tuple[GGUFPart, ...]:
    paths = part_paths(path)
    missing = [one.name for one in paths if not one.exists()]
    if path.exists() and missing:
        raise WeightsError(
            f"{path} is one of {len(paths)} parts; missing: {', '.join(missing[:5])}",
            hint="download all parts into one directory",
            field=missing[0],
        )
    parts = tuple(GGUFPart(one) for one in paths)
    for number, part in enumerate(parts):
        _check_part(part, number, len(parts))
    return parts


def _check_part(part: GGUFPart, number: int, count: int) -> None:
    """Raises WeightsError unless the file says to be the part that its name says."""
    own_count = part.header.metadata.get("split.count", 1)
    own_number = part.header.metadata.get("split.no", 0)
    if count == 1 and own_count in (0, 1):
        return
    if own_count != count:
        hint = DOWNLOAD_AGAIN
        if count == 1:
            hint = "give the parts the names they were made with: NAME-00001-of-00003.gguf and so on"
        raise WeightsError(
            f"{part.path}: split.count is {str(own_count)[:40]}, its name says {count}", hint=hint, field="split.count"
        )
    if own_number != number:
        raise WeightsError(
            f"{part.path}: split.no is {str(own_number)[:40]}, its name says {number} (from 0)",
            hint="give the parts the names they were made with, or download them again",
            field="split.no",
        )


def _owners(parts: Sequence[GGUFPart]) -> dict[str, GGUFPart]:
    owners: dict[str, GGUFPart] = {}
    for part in parts:
        for name in part.header.tensors:
            if name in owners:
                raise WeightsError(
                    f"tensor {name[:200]!r} is in {owners[name].path.name} and in {part.path.name}",
                    hint="the parts belong to different models: download them again",
                    field=name[:200],
                )
            owners[name] = part
    return owners


def _check_tensor_count(parts: Sequence[GGUFPart], num_tensors: int) -> None:
    expected = parts[0].header.metadata.get("split.tensors.count", num_tensors)
    if len(parts) > 1 and expected != num_tensors:
        raise WeightsError(
            f"{parts[0].path}: split.tensors.count is {str(expected)[:40]}, the parts have {num_tensors} tensors",
            hint="the parts belong to different models: download them again",
            field="split.tensors.count",
        )
