"""Reads recordings: a file, or the files of a run in a directory, up to where they are torn.

Used by replays and by the simulator's command. Everything is checked: a recording may come from anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError, MessageError, ValidationError
from quire.flight_recorder.records import FRAME, MAGIC, SUFFIX, VERSION, Call, Head, Record, decoder


@dataclass(slots=True)
class Recording:
    """Calls of one run of an engine core, and what it began from.

    Attributes:
        head: of the first file.
        files: in order; each but the first goes on where the one before ends.
        torn: file -> what is wrong at its end, as far as it has been read.
    """

    head: Head
    files: list[Path]
    torn: dict[Path, str] = field(default_factory=dict)

    def calls(self) -> Iterator[Call]:
        """The recorded calls, in order; a torn file ends them."""
        for path in self.files:
            for record in _records(path, self.torn):
                if not isinstance(record, Head):
                    yield record
            if path in self.torn:
                return


def read_recording(path: Path, run: str | None = None) -> Recording:
    """A recording file, or of a directory the newest files that follow each other.

    Args:
        run: which run of a directory; default: the newest.

    Raises:
        ConfigError: there is no recording.
        ValidationError: a file is none, or of a newer version.
    """
    if path.is_dir():
        return _read_directory(path, run)
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a recording", hint="name a file or a directory of --flight-recorder", field="recording"
        )
    return Recording(read_head(path), [path])


def read_head(path: Path) -> Head:
    """How a file begins.

    Raises:
        ValidationError: it is not a recording, of another version, or names a plugin.
    """
    torn: dict[Path, str] = {}
    head = next(_records(path, torn), None)
    if not isinstance(head, Head):
        raise ValidationError(f"{path} is not a recording: {torn.get(path, 'its first record is not a header')}")
    # Of version 1 the calls are the same, but the prefix cache remembers other blocks, so replays would differ.
    if head.version != VERSION:
        raise ValidationError(
            f"{path} has format version {head.version}; this Quire ({VERSION}) reads {VERSION}",
            hint=f"use Quire {head.quire_version}, which wrote it",
        )
    if head.setup.scheduler.has_plugin:
        raise ValidationError(
            f"{path} uses a scheduler or policy plugin; recordings never load code",
            hint="only recordings of Quire's own scheduler and policies are read", field="recording",
        )  # fmt: skip
    return head


def _read_directory(path: Path, run: str | None) -> Recording:
    heads = {}
    for file in path.glob(f"*{SUFFIX}"):
        if file.is_file() and (run is None or file.name.startswith(run)):
            heads[file] = read_head(file)
    if not heads:
        what = f"no run {run}" if run is not None else f"no *{SUFFIX}"
        raise ConfigError(f"{path} holds {what}", hint="pass a directory of --flight-recorder", field="recording")
    newest = max(heads.values(), key=lambda head: head.wall_time).run
    files = sorted((file for file in heads if heads[file].run == newest), key=lambda file: heads[file].number)
    first = len(files) - 1
    while first and heads[files[first]].follows and heads[files[first - 1]].number == heads[files[first]].number - 1:
        first -= 1
    return Recording(heads[files[first]], files[first:])


def _records(path: Path, torn: dict[Path, str]) -> Iterator[Record]:
    with path.open("rb") as file:
        size = path.stat().st_size
        if file.read(len(MAGIC)) != MAGIC:
            torn[path] = "it has another type"
            return
        while size - file.tell() >= FRAME.size:
            start = file.tell()
            length, checksum = FRAME.unpack(file.read(FRAME.size))
            if length > size - file.tell():
                torn[path] = f"the record at byte {start} is cut off"
                return
            payload = file.read(length)
            if zlib.crc32(payload) != checksum:
                torn[path] = f"the record at byte {start} is damaged"
                return
            try:
                yield decoder.decode([payload])
            except MessageError as error:
                torn[path] = f"the record at byte {start} is not valid: {error.message}"
                return
        if file.tell() != size:
            torn[path] = f"the record at byte {file.tell()} is cut off"
