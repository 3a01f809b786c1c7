"""The ring of files on disk: one is written, the oldest are deleted so that all of them stay within a size.

Used by the writer's thread alone. Files are for their owner's eyes only (mode 0600).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from quire.errors import ConfigError
from quire.flight_recorder.records import MAGIC, SUFFIX

MODE = 0o600
NUM_SEGMENTS = 8


class SegmentRing:
    """The newest files of a directory.

    Args:
        directory: made if it does not exist.
        max_bytes: of all recordings in it, those of earlier runs included; the file being written is always kept.
        run: name of this run, by which its files are named.

    Attributes:
        segment_bytes: a file should not grow beyond this.
        num_written: bytes of records in the current file, its head not counted.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path, max_bytes: int, run: str) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._run = run
        self._file: BinaryIO | None = None
        self._name = ""
        self.segment_bytes = max_bytes // NUM_SEGMENTS
        self.num_written = 0
        self._num_left = 0  # bytes until others have to be deleted
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(13, "it is not writable")
        except OSError as error:
            raise ConfigError(
                f"flight_recorder={str(directory)!r} cannot be used: {error.strerror}",
                hint="choose a writable directory",
                field="flight_recorder",
            ) from None

    def begin(self, number: int, head: bytes) -> None:
        """Begin the file of this number with its head; make room for it."""
        self.close()
        path = self._directory / f"{self._run}-{number:06d}{SUFFIX}"
        self._make_room(len(head) + len(MAGIC) + self.segment_bytes)
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "wb", buffering=0)
        self._name = path.name
        self._file.write(MAGIC + head)
        self._num_left -= len(MAGIC) + len(head)
        self.num_written = 0

    def write(self, data: bytes) -> None:
        """Add whole records to the file."""
        assert self._file is not None, "a file is begun first"
        if len(data) > self._num_left:
            self._make_room(len(data))
        self._file.write(data)
        self._num_left -= len(data)
        self.num_written += len(data)

    def close(self) -> None:
        """End the file; harmless when repeated."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest files, but not the one being written, until so many bytes more are within the size."""
        newest = None if self._file is None else self._name
        files = sorted(self._directory.glob(f"*{SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files, sizes, strict=True):
            if total + num_bytes > self._max_bytes and path.name != newest:
                path.unlink(missing_ok=True)
                total -= size
        self._num_left = self._max_bytes - total
