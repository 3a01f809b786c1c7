"""BlockFiles: the disk part of an `OffloadStore`: reads and writes files, and is the one to know which there are.

`num_leading`, `touch` and `in` answer from memory, for the thread that runs the steps; all else works on the disk, for
threads of the store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import numpy as np

from quire.kv_offload.block_file import HEADER, read_block_file, write_block_file
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.faults import BlockFault, kind_of
from quire.logger import get_logger

logger = get_logger(__name__)


class BlockFiles:
    """The files of one namespace of a directory.

    Args:
        counts: gets what is stored, loaded, evicted, and what went wrong.
    """

    def __init__(self, directory: BlockDirectory, index: DiskIndex, counts: OffloadCounts) -> None:
        self._directory, self._index, self._counts = directory, index, counts
        self._prefix = directory.prefix

    def __contains__(self, key: bytes) -> bool:
        return self._prefix + key in self._index

    def num_leading(self, keys: Sequence[bytes], first: int) -> int:
        """How many of `keys[first:]`, from their beginning on, are here."""
        return self._index.num_leading(self._prefix, keys, first)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are here."""
        return self._index.holds(self._prefix, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks of one sequence, in its order, were used: its first block is the last to go."""
        self._index.touch(self._prefix + key for key in reversed(keys))

    def write(self, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
        """Store a block ([num_bytes] uint8), and remove those that go for it.

        Raises:
            OSError: the disk does not take it.
        """
        name, size = self._prefix + key, HEADER.size + len(payload)
        if not self._index.fits(size):
            self._counts.add(num_dropped=1)
            return
        path = self._directory.path_of(name)
        try:
            write_block_file(path, self._directory.namespace, key, payload, used_at_ns)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_block_file(path, self._directory.namespace, key, payload, used_at_ns)
        self._counts.add(num_stored=1, stored_bytes=len(payload))
        self._remove_evicted(self._index.add(name, size))

    def read(self, key: bytes, payload: np.ndarray, used_at_ns: int) -> None:
        """Load a block to `payload` ([num_bytes] uint8), which after an error holds anything.

        Raises:
            BlockFault: the file is not that of this block, whole and undamaged.
            OSError: it cannot be read.
        """
        path = self._directory.path_of(self._prefix + key)
        read_block_file(path, self._directory.namespace, key, payload)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used_at_ns, used_at_ns))

    def note_fault(self, key: bytes, error: OSError | BlockFault) -> None:
        """Count what went wrong with a block; a damaged file is removed."""
        kind, name = kind_of(error), self._prefix + key
        self._counts.add_fault(kind)
        logger.warning("kv_disk: %s: %s", self._directory.path_of(name), error)
        if kind.is_damage:
            self._directory.remove(name)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Offer these blocks no longer; they are stored anew when they have been computed."""
        for key in keys:
            self._index.remove(self._prefix + key)

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
