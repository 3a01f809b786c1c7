"""BlockFiles: the disk part of an `OffloadStore`: reads and writes files, and is the one to know which there are.

`num_leading`, `touch` and `in` answer from memory, for the thread that runs the steps; all else works on the disk, for
threads of the store.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import numpy as np

from quire.kv_offload.block_file import HEADER, read_block_file, write_block_file
from quire.kv_offload.cipher import OVERHEAD_BYTES, BlockCipher
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.faults import BlockFault, FaultKind, kind_of
from quire.logger import get_logger

logger = get_logger(__name__)


class BlockFiles:
    """The files of one namespace of a directory.

    Args:
        counts: gets what is stored, loaded, evicted, and what went wrong.
        cipher: None = files are not encrypted.
    """

    def __init__(
        self, directory: BlockDirectory, index: DiskIndex, counts: OffloadCounts, cipher: BlockCipher | None = None
    ) -> None:
        self._directory, self._index, self._counts, self._cipher = directory, index, counts, cipher
        self._prefix = directory.prefix
        self._overhead = 0 if cipher is None else OVERHEAD_BYTES

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._index

    def _name(self, key: bytes) -> bytes:
        """By which the directory and its index know a block."""
        return self._prefix + (key if self._cipher is None else self._cipher.name_of(key))

    def num_leading(self, keys: Sequence[bytes], first: int) -> int:
        """How many of `keys[first:]`, from their beginning on, are here."""
        if self._cipher is None:
            return self._index.num_leading(self._prefix, keys, first)
        end = first
        while end < len(keys) and keys[end] in self:
            end += 1
        return end - first

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are here."""
        return self._index.holds([self._name(key) for key in keys])

    def is_of_others(self, key: bytes) -> bool:
        """Whether another namespace of the directory has a block with this key."""
        return self._index.is_of_others(self._prefix, key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks of one sequence, in its order, were used: its first block is the last to go."""
        self._index.touch(self._name(key) for key in reversed(keys))

    def write(self, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
        """Store a block ([num_bytes] uint8), and remove those that go for it.

        Raises:
            OSError: the disk does not take it.
        """
        name, size = self._name(key), HEADER.size + self._overhead + len(payload)
        if not self._index.fits(size):
            self._counts.add(num_dropped=1)
            return
        path, stored_as = self._directory.path_of(name), name[len(self._prefix) :]
        stored = payload if self._cipher is None else self._cipher.seal(stored_as, payload)
        try:
            write_block_file(path, self._directory.namespace, stored_as, stored, used_at_ns)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_block_file(path, self._directory.namespace, stored_as, stored, used_at_ns)
        self._counts.add(num_stored=1, stored_bytes=len(payload))
        self._remove_evicted(self._index.add(name, size))

    def read(self, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
        """Load a block to `payload` ([num_bytes] uint8), which after an error holds anything.

        Raises:
            BlockFault: the file is not that of this block, whole and undamaged.
            OSError: it cannot be read.
        """
        name = self._name(key)
        path, stored_as = self._directory.path_of(name), name[len(self._prefix) :]
        stored = payload if self._cipher is None else np.empty(len(payload) + OVERHEAD_BYTES, np.uint8)
        read_block_file(path, self._directory.namespace, stored_as, stored)
        if self._cipher is not None:
            self._cipher.open(stored_as, stored, payload)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used_at_ns, used_at_ns))

    def read_whole(self, key: bytes, most_bytes: int) -> np.ndarray:
        """The payload of a block of at most `most_bytes`, [num_bytes] uint8; errors as `read`."""
        size = self._directory.path_of(self._name(key)).stat().st_size - HEADER.size - self._overhead
        if not 0 < size <= most_bytes:
            raise BlockFault(FaultKind.WRONG_SIZE, f"{size} bytes of payload, expected at most {most_bytes}")
        payload = np.empty(size, np.uint8)
        self.read(key, payload, time.time_ns())
        return payload

    def expect(self, key: bytes) -> None:
        """Ask the system to read a file that will be read soon."""
        file = os.open(self._directory.path_of(self._name(key)), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)

    def note_fault(self, key: bytes, error: OSError | BlockFault) -> None:
        """Count what went wrong with a block; a damaged file is removed."""
        kind, name = kind_of(error), self._name(key)
        self._counts.add_fault(kind)
        logger.warning("kv_disk: %s: %s", self._directory.path_of(name), error)
        if kind.is_damage:
            self._directory.remove(name)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Offer these blocks no longer; they are stored anew when they have been computed."""
        for key in keys:
            self._index.remove(self._name(key))

    def refresh(self) -> None:
        """Take in what others have stored and removed."""
        try:
            scan = self._directory.scan()
        except OSError as error:
            self._counts.add_fault(kind_of(error))
            return
        for name in scan.gone:
            self._index.remove(name)
        for one in scan.found:
            self._remove_evicted(self._index.add(one.name, one.size))

    def _remove_evicted(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._directory.remove(name)
        if names:
            self._counts.add(num_evicted=len(names))
