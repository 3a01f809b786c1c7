"""The two files of a batch: requests, read twice and never whole; results, appended to, so that a run can go on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from quire.batch.lines import BadLine, BatchRequest, read_line
from quire.errors import ConfigError, ValidationError
from quire.utils.checks import shown


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    line: int | None = None


class _Result(msgspec.Struct):
    custom_id: str | None
    response: _Response | None = None
    error: _Error | None = None


@dataclass(slots=True)
class Finished:
    """What the results so far are of.

    Attributes:
        custom_ids: of requests; `lines`: numbers of lines that have no usable one.
        num_failed: results that are no answer.
    """

    custom_ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    num_failed: int = 0

    def has(self, entry: BatchRequest | BadLine) -> bool:
        """Whether `entry` has its result."""
        return entry.line in self.lines if entry.custom_id is None else entry.custom_id in self.custom_ids

    def note(self, result: _Result) -> None:
        """Take a result in.

        Raises:
            ValueError: its request is not named, or already has a result.
        """
        self.num_failed += not is_answer(result)
        if result.custom_id is not None:
            if result.custom_id in self.custom_ids:
                raise ValueError(f"custom_id {shown(result.custom_id)} already has a result")
            self.custom_ids.add(result.custom_id)
        elif result.error is not None and result.error.line is not None:
            self.lines.add(result.error.line)
        else:
            raise ValueError("it has neither custom_id nor the number of a line")


def is_answer(result: _Result) -> bool:
    """Whether a result is what was asked for."""
    return result.response is not None and result.response.status_code == 200


class RequestFile:
    """The file of requests.

    Attributes:
        num_lines: that are not empty.
        custom_ids: of all of them.

    Raises:
        ConfigError: it cannot be read.
        ValidationError: two lines have the same custom_id.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.num_lines = 0
        self.custom_ids: set[str] = set()
        for entry in self:
            self.num_lines += 1
            if entry.custom_id is None:
                continue
            if entry.custom_id in self.custom_ids:
                raise ValidationError(
                    f"{path}, line {entry.line}: custom_id {shown(entry.custom_id)} is also used on an earlier line",
                    hint="use a unique custom_id for each request", field="custom_id",
                )  # fmt: skip
            self.custom_ids.add(entry.custom_id)

    def __iter__(self) -> Iterator[BatchRequest | BadLine]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield read_line(number, line)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be read: {error.strerror}", hint="check --input-file", field="input_file"
            ) from None


class ResultFile:
    """The file of results, locked while it is open.

    A last line that was cut off (the process was killed while it wrote) is removed.

    Args:
        retries_failed: remove results that are no answers, so that they are asked again.

    Attributes:
        finished: what stood in it.

    Raises:
        ConfigError: it cannot be written, another run writes it, or it holds something else.
    """

    def __init__(self, path: str, *, retries_failed: bool = False) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}", hint="check --output-file", field="output_file"
            ) from None
        try:
            self._lock()
            self.finished = self._read(retries_failed=retries_failed)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, line: bytes) -> None:
        """Append a line; it is the system's when this returns."""
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to {self._path}", hint="wait for it, or choose another --output-file",
                field="output_file",
            ) from None  # fmt: skip

    def _read(self, *, retries_failed: bool) -> Finished:
        finished, end = Finished(), 0
        kept: list[bytes] = []
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            for number, line in enumerate(reader, 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    result = msgspec.json.decode(line, type=_Result)
                    if retries_failed and not is_answer(result):
                        continue
                    finished.note(result)
                except ValueError as error:
                    raise ConfigError(
                        f"{self._path}, line {number} is not the result of a batch: {error}",
                        hint="choose another --output-file, or remove this one", field="output_file",
                    ) from None  # fmt: skip
                if retries_failed:
                    kept.append(line)
        os.ftruncate(self._file.fileno(), end)
        if retries_failed and sum(map(len, kept)) != end:
            self._replace(kept)
        return finished

    def _replace(self, lines: list[bytes]) -> None:
        """Put a file of `lines` in the place of this one, in one step."""
        path = self._path.with_name(self._path.name + ".part")
        with path.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        path.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab+", buffering=0)
        self._lock()
