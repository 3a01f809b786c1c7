"""What can go wrong with a stored block, by kind, as it is counted. Used by `block_file` and the stores; no state."""

from __future__ import annotations

import errno
from enum import Enum

from quire.errors import QuireError


class FaultKind(Enum):
    """Labels of the metric that counts faults."""

    NOT_A_BLOCK = "not_a_block"
    OTHER_VERSION = "other_version"
    OTHER_BLOCK = "other_block"
    WRONG_SIZE = "wrong_size"
    WRONG_CHECKSUM = "wrong_checksum"
    WRONG_TAG = "wrong_tag"
    MISSING = "missing"
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    IO_ERROR = "io_error"
    HUNG = "hung"
    SLOW = "slow"

    @property
    def is_damage(self) -> bool:
        """Whether the file is worth nothing to anyone."""
        return self in _DAMAGE


_DAMAGE = frozenset(
    (
        FaultKind.NOT_A_BLOCK, FaultKind.OTHER_BLOCK, FaultKind.WRONG_SIZE, FaultKind.WRONG_CHECKSUM,
        FaultKind.WRONG_TAG,
    )
)  # fmt: skip

_OF_ERRNO = {
    errno.ENOENT: FaultKind.MISSING, errno.ENOTDIR: FaultKind.MISSING, errno.ELOOP: FaultKind.NOT_A_BLOCK,
    errno.ENOSPC: FaultKind.NO_SPACE, errno.EDQUOT: FaultKind.NO_SPACE, errno.EFBIG: FaultKind.NO_SPACE,
    errno.EROFS: FaultKind.READ_ONLY, errno.EACCES: FaultKind.READ_ONLY, errno.EPERM: FaultKind.READ_ONLY,
}  # fmt: skip


class BlockFault(QuireError):
    """A stored block that cannot be used: it is computed again."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def kind_of(error: OSError | BlockFault) -> FaultKind:
    """As what an error is counted."""
    if isinstance(error, BlockFault):
        return error.kind
    return _OF_ERRNO.get(error.errno or 0, FaultKind.IO_ERROR)
