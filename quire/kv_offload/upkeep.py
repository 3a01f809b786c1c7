"""What people do with a directory of blocks: list it, verify every file, clear it. Called by `quire cache`; no state.

Servers may be using the directory meanwhile: files that vanish are skipped, and one that is removed is computed again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.kv_offload.block_file import DIGEST_BYTES, HEADER, SUFFIX, TEMPORARY_SUFFIX, read_block_file
from quire.kv_offload.directory import NAMESPACE_BYTES
from quire.kv_offload.faults import BlockFault, FaultKind

MAX_ABOUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Namespace:
    """The blocks of one model with one layout.

    Attributes:
        name: 32 digits.
        about: what it is of, as the server that made it says.
        num_blocks, num_bytes: of its files.
        used_s: seconds since 1970, of the newest use; 0 = it is empty.
    """

    name: str
    about: dict[str, Any]
    num_blocks: int
    num_bytes: int
    used_s: float


def check_directory(root: Path) -> None:
    """Raise `ConfigError` unless this is a directory that `kv_disk` named."""
    if not (root / "CACHEDIR.TAG").is_file():
        raise ConfigError(
            f"{str(root)!r} is not a directory of KV-cache blocks", hint="give what --kv-disk was given", field="path"
        )


def namespaces(root: Path) -> list[Namespace]:
    """All of a directory, the one that was used last first."""
    found = []
    for home in sorted(root.iterdir()):
        if home.is_dir() and _is_digits(home.name, 2 * NAMESPACE_BYTES):
            sizes = [one for path in _files(home, SUFFIX) if (one := _status(path)) is not None]
            newest = max((one.st_mtime for one in sizes), default=0.0)
            found.append(Namespace(home.name, _about(home), len(sizes), sum(one.st_size for one in sizes), newest))
    return sorted(found, key=lambda one: one.used_s, reverse=True)


def verify(root: Path, name: str) -> Iterator[tuple[Path, BlockFault | OSError]]:
    """The files of a namespace that are not what they should be, and why."""
    prefix = bytes.fromhex(name)
    for path in _files(root / name, SUFFIX):
        try:
            _verify_file(path, prefix)
        except FileNotFoundError:
            continue
        except (BlockFault, OSError) as fault:
            yield path, fault


def clear(root: Path, name: str) -> int:
    """Remove the files of a namespace; bytes that are free by that."""
    freed = 0
    home = root / name
    for path in [*_files(home, SUFFIX), *_files(home, TEMPORARY_SUFFIX)]:
        status = _status(path)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            freed += 0 if status is None else status.st_size
    return freed


def _verify_file(path: Path, prefix: bytes) -> None:
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise BlockFault(FaultKind.WRONG_SIZE, f"{len(header)} bytes, fewer than a header")
    _, _, num_bytes, namespace, _, _ = HEADER.unpack(header)
    if namespace[:NAMESPACE_BYTES] != prefix:
        raise BlockFault(FaultKind.OTHER_BLOCK, "it is of another namespace")
    if num_bytes + HEADER.size != path.stat().st_size:
        raise BlockFault(FaultKind.WRONG_SIZE, f"its header claims {num_bytes} bytes after it")
    if not _is_digits(path.stem, 2 * DIGEST_BYTES):
        raise BlockFault(FaultKind.NOT_A_BLOCK, "its name is not a key")
    read_block_file(path, namespace, bytes.fromhex(path.stem), np.empty(num_bytes, np.uint8))


def _files(home: Path, suffix: str) -> Iterator[Path]:
    for shard in sorted(home.iterdir()):
        if shard.is_dir() and not shard.is_symlink() and _is_digits(shard.name, 2):
            yield from sorted(path for path in shard.iterdir() if path.name.endswith(suffix))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _about(home: Path) -> dict[str, Any]:
    try:
        with (home / "about.json").open(encoding="utf-8") as file:
            about = json.loads(file.read(MAX_ABOUT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _is_digits(text: str, num_digits: int) -> bool:
    return len(text) == num_digits and all(digit in "0123456789abcdef" for digit in text)
