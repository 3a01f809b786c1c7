"""BlockDirectory: the files of a store, and what of them is new. Called by `BlockFiles`.

    PATH/CACHEDIR.TAG                                    # for programs that make backups
    PATH/<namespace: 32 digits>/about.json               # which model, for people and `quire cache list`
    PATH/<namespace: 32 digits>/<2 digits>/<key: 64 digits>.kv

Several servers may use one directory: files appear and vanish at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.kv_offload.block_file import SUFFIX, TEMPORARY_SUFFIX

NAMESPACE_BYTES = 16
"""Of a namespace's digest, those that name its directory; the file's header has all."""
TEMPORARY_MAX_AGE_S = 600.0
"""After which a temporary file is one that a killed process left behind."""
_SETTLING_S = 1.0  # for so long after a change a directory may change again and keep its time
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# KV-cache blocks of Quire; safe to delete.\n"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that a scan found: its name, bytes, and the time of its last use in seconds."""

    name: bytes
    size: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Scan:
    """What has changed since the last scan."""

    found: tuple[FoundFile, ...]
    gone: tuple[bytes, ...]


class BlockDirectory:
    """The files, by name: 16 bytes of the namespace, then the key.

    Args:
        root: PATH.
        namespace: 32 bytes; of the blocks that this process reads and writes.
    """

    def __init__(self, root: Path, namespace: bytes) -> None:
        self.root = root
        self.namespace = namespace
        self.prefix = namespace[:NAMESPACE_BYTES]
        self._shards: dict[Path, tuple[int, frozenset[bytes]]] = {}

    def create(self, about: Mapping[str, object]) -> None:
        """Make the directory, if need be, and say in it what its namespace is of.

        Raises:
            ConfigError: it cannot be made, or others could write to it.
        """
        try:
            with contextlib.suppress(FileExistsError):
                self.root.mkdir(mode=0o700, parents=True)
            check_owner(self.root)
        except OSError as cause:
            raise ConfigError(
                f"kv_disk={str(self.root)!r} cannot be used: {cause.strerror}",
                hint="name a directory that can be created and written", field="kv_disk",
            ) from cause  # fmt: skip
        with contextlib.suppress(OSError):  # a directory that is read-only is read
            self._write_once(self.root / "CACHEDIR.TAG", _TAG)
            home = self.root / self.prefix.hex()
            home.mkdir(mode=0o700, exist_ok=True)
            self._write_once(home / "about.json", json.dumps(about, indent=1) + "\n")

    def path_of(self, name: bytes) -> Path:
        """Where the file of a name is."""
        key = name[NAMESPACE_BYTES:].hex()
        return self.root / name[:NAMESPACE_BYTES].hex() / key[:2] / f"{key}{SUFFIX}"

    def remove(self, name: bytes) -> None:
        """Remove a file, if it is there and can be."""
        with contextlib.suppress(OSError):
            self.path_of(name).unlink(missing_ok=True)

    def scan(self) -> Scan:
        """What has come and gone since the last scan: in directories that have changed, which is cheap to ask.

        Raises:
            OSError: the directory cannot be read.
        """
        found: list[FoundFile] = []
        gone: list[bytes] = []
        present = set()
        for shard in self._find_shards():
            present.add(shard)
            self._scan_shard(shard, found, gone)
        for shard in self._shards.keys() - present:
            gone.extend(self._shards.pop(shard)[1])
        found.sort(key=lambda one: one.used_at)
        return Scan(tuple(found), tuple(gone))

    def _find_shards(self) -> Iterator[Path]:
        for home in _directories(self.root, 2 * NAMESPACE_BYTES):
            yield from _directories(home, 2)

    def _scan_shard(self, shard: Path, found: list[FoundFile], gone: list[bytes]) -> None:
        changed_ns, before = self._shards.get(shard, (-1, frozenset()))
        try:
            now_ns = shard.stat().st_mtime_ns
            if now_ns == changed_ns:
                return
            files = _list_files(shard)
        except FileNotFoundError:
            return
        found += [_found(entry, name) for name, entry in files.items() if name not in before]
        gone += before - files.keys()
        is_settled = time.time() - now_ns / 1e9 > _SETTLING_S
        self._shards[shard] = now_ns if is_settled else -1, frozenset(files)

    def _write_once(self, path: Path, text: str) -> None:
        if not path.exists():
            temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)


def check_owner(path: Path) -> None:
    """Refuse a directory that other users could put files into: keys and values decide what is answered.

    Raises:
        ConfigError: it is not a directory, belongs to another user, or others may write to it.
        OSError: it cannot be looked at.
    """
    status = path.stat()
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "it is not a directory"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = f"it belongs to another user (uid {status.st_uid})"
    elif status.st_mode & 0o022:
        problem = f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    if problem:
        hint = "name a directory of this user alone, mode 700"
        raise ConfigError(f"kv_disk={str(path)!r} cannot be used: {problem}", hint=hint, field="kv_disk")


def _directories(path: Path, num_digits: int) -> Iterator[Path]:
    """Subdirectories whose names are so many hexadecimal digits."""
    with os.scandir(path) as entries:
        for entry in entries:
            if len(entry.name) == num_digits and _is_hex(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _list_files(shard: Path) -> dict[bytes, os.DirEntry[str]]:
    """The files of blocks by name; old temporary files are removed."""
    files = {}
    prefix = bytes.fromhex(shard.parent.name)
    with os.scandir(shard) as entries:
        for entry in entries:
            stem = entry.name.removesuffix(SUFFIX)
            if stem != entry.name and len(stem) == 64 and _is_hex(stem):
                files[prefix + bytes.fromhex(stem)] = entry
            elif entry.name.endswith(TEMPORARY_SUFFIX):
                _remove_if_old(entry)
    return files


def _remove_if_old(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > TEMPORARY_MAX_AGE_S:
            Path(entry.path).unlink(missing_ok=True)


def _found(entry: os.DirEntry[str], name: bytes) -> FoundFile:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return FoundFile(name, 0, 0.0)  # it has just gone, which the next scan shows
    return FoundFile(name, status.st_size, status.st_mtime)


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in text)
