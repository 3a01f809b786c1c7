"""The heap of the C library: giving back what is free. Called by servers; owns nothing."""

from __future__ import annotations

import ctypes
import gc


def give_back_free_memory() -> bool:
    """Collect garbage, and return free pages of the heap to the system; False without glibc, whose call it is."""
    gc.collect()  # an error and its traceback hold what was refused until the collector comes, which idle servers delay
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    trim.argtypes = [ctypes.c_size_t]
    return bool(trim(0))
