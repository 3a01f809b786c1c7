"""The heap of the C library: what it keeps, and giving back what is free. Called by servers; owns nothing."""

from __future__ import annotations

import ctypes
import gc

LARGE_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def map_large_blocks() -> bool:
    """Have blocks from `LARGE_BYTES` on returned to the system when they are freed; False without glibc.

    By default glibc raises this size to that of the largest block that was freed, up to 32 MiB, and freed bodies below
    something that is in use stay in the heap.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES))


def give_back_free_memory() -> bool:
    """Collect garbage, and return free pages of the heap to the system; False without glibc, whose call it is."""
    gc.collect()  # an error and its traceback hold what was refused until the collector comes, which idle servers delay
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    trim.argtypes = [ctypes.c_size_t]
    return bool(trim(0))
