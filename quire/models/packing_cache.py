"""Packed weights kept on disk, so that the next start reads them instead of packing again.

Called by the loader. One file per key, written whole and renamed into place; a file is used only when every byte of it
is what was written. A cache that cannot be used is a warning and a miss, never an error. Owns no state but the files.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from quire import envs
from quire.kernels.native.runtime import NativeRuntime
from quire.logger import get_logger
from quire.models.packed_file import SUFFIX, BadEntryError, check_owner, read_packed_file, write_packed_file
from quire.utils.memory import GIB, format_bytes

logger = get_logger(__name__)

DEFAULT_MAX_BYTES = 32 * GIB
TEMPORARY_PREFIX = ".writing-"
# A temporary file this old belongs to a process that died.
ABANDONED_S = 24 * 3600
# A link is refused; a pipe does not block.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def default_cache_directory() -> Path | None:
    """Where packed weights are kept: `packed` in Quire's cache directory; None where there is no such place."""
    root = envs.cache_dir()
    return None if root is None else root / "packed"


class PackingCache:
    """Packed tensors by key.

    Args:
        directory: made when first written to, readable by this user alone.
        runtime: whose threads compute checksums.
        max_bytes: entries used least lately are removed when all together are larger.
    """

    def __init__(self, directory: Path, runtime: NativeRuntime, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._directory = directory
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._writer: threading.Thread | None = None

    def open(self, key: str, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor] | None:
        """The tensors written under `key`, or None.

        Args:
            key: as from `packing_key`.
            into: contiguous CPU tensors that take the values; names, shapes and types must be those that were written.
                Where None is returned they are as they were, or zeros. None = new ones.

        Cost: copies the entry once.
        """
        path = self._path(key)
        try:
            check_owner(os.stat(self._directory), self._directory)
            file = os.open(path, OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except (OSError, BadEntryError) as error:
            logger.warning("packed weights in %s are not used: %s", path, error)
            return None
        try:
            tensors = read_packed_file(file, key, self._runtime, into)
            with suppress(OSError):  # on a read-only file system nothing is removed either
                os.utime(file)
            return tensors
        except (OSError, BadEntryError) as error:
            logger.warning("packed weights in %s are not used: %s", path, error)
            if isinstance(error, BadEntryError) and error.is_damaged:
                self._remove(path, file)
            for tensor in (into or {}).values():
                tensor.zero_()
            return None
        finally:
            os.close(file)

    def write(self, key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keep contiguous CPU `tensors` under `key`; False, with a warning, where that cannot be done.

        Of two writers of one key the last wins; a reader sees one or the other, whole.
        """
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        if num_bytes > self._max_bytes:
            size, limit = format_bytes(num_bytes), format_bytes(self._max_bytes)
            logger.warning("packed weights are not cached: %s is more than the cache limit of %s", size, limit)
            return False
        temporary: Path | None = None
        try:
            self._make_directory()
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=self._directory)
            temporary = Path(name)
            with open(descriptor, "wb") as file:
                write_packed_file(file, key, tensors, self._runtime)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path(key))
            self._sync_directory()
        except (OSError, BadEntryError) as error:
            logger.warning("packed weights are not cached in %s: %s", self._directory, error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            return False
        self._prune(keep=self._path(key))
        return True

    def write_behind(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `write`, in a thread of its own, which the end of the process waits for.

        The tensors must not change any more.
        """
        self._writer = threading.Thread(target=self.write, args=(key, tensors), name="keep-packed-weights")
        self._writer.start()

    def wait(self) -> None:
        """Return when nothing is being written by `write_behind`."""
        if self._writer is not None:
            self._writer.join()

    def _path(self, key: str) -> Path:
        assert key.isalnum(), "a key is hexadecimal: it is a file name"
        return self._directory / f"{key}{SUFFIX}"

    def _make_directory(self) -> None:
        missing = [folder for folder in (self._directory, *self._directory.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
        check_owner(os.stat(self._directory), self._directory)

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove(self, path: Path, file: int) -> None:
        """Remove a damaged entry, unless another writer has replaced it meanwhile."""
        with suppress(OSError):
            if os.path.samestat(os.lstat(path), os.fstat(file)):
                path.unlink()

    def _prune(self, keep: Path) -> None:
        """Remove the entries used least lately above the limit, and what dead writers left."""
        try:
            found = [(path, path.lstat()) for path in self._directory.iterdir()]
        except OSError:
            return  # another process prunes too
        for path, status in found:
            if path.name.startswith(TEMPORARY_PREFIX) and time.time() - status.st_mtime > ABANDONED_S:
                with suppress(OSError):
                    path.unlink()
        entries = [(status.st_mtime_ns, path, status.st_size) for path, status in found if path.suffix == SUFFIX]
        total = sum(size for _, _, size in entries)
        for _, path, size in sorted(entries):
            if total <= self._max_bytes or path == keep:
                continue
            with suppress(OSError):
                path.unlink()
                logger.info("removed old packed weights from the cache: %s", path)
            total -= size
