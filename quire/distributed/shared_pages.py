"""SharedPages: the memory of one rank's KV cache, where rank 0 maps it, too: what keeps blocks outside sees all ranks'.

Made by a rank for itself, and by rank 0 for every other. A file without a name, as `shared_memory.make_region` makes:
nothing of it is left behind. Used only where blocks leave the cache, as the system rarely has huge pages for it.
"""

from __future__ import annotations

import mmap
import os

from quire.errors import CommunicationError


def make_shared_pages(size: int) -> tuple[int, ...]:
    """A descriptor for each of `size` ranks; the caller's to close.

    Raises:
        CommunicationError: the system has no such memory.
    """
    fds: list[int] = []
    try:
        fds.extend(os.memfd_create(f"quire-cache-{rank}") for rank in range(size))
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise CommunicationError(f"no memory to share between {size} processes: {error}") from error
    return tuple(fds)


class SharedPages:
    """Takes piece after piece. The same sizes in the same order are the same memory in every process.

    Args:
        fd: of `make_shared_pages`; need not stay open.
        is_owner: the rank whose cache it is, which takes first; others map what is there.
    """

    def __init__(self, fd: int, *, is_owner: bool) -> None:
        self._fd = fd
        self._is_owner = is_owner
        self._end = 0

    def take(self, num_bytes: int) -> mmap.mmap:
        """The next piece, of zeros at first; pages are taken from the system as they are written.

        Raises:
            CommunicationError: there is no room, or the owner has taken less.
        """
        begin, granularity = self._end, mmap.ALLOCATIONGRANULARITY
        self._end += -(-max(num_bytes, 1) // granularity) * granularity
        try:
            if self._is_owner:
                os.ftruncate(self._fd, self._end)
            elif os.fstat(self._fd).st_size < self._end:
                raise CommunicationError("the caches of two ranks differ in size")
            return mmap.mmap(self._fd, max(num_bytes, 1), offset=begin)
        except OSError as error:
            raise CommunicationError(f"no memory to share for a KV cache of {self._end} bytes: {error}") from error
