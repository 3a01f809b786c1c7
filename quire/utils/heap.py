"""The heap of the C library: giving back what is free. Called by servers; owns nothing."""

from __future__ import annotations

import ctypes


def give_back_free_memory() -> bool:
    """Return free pages of the heap to the system; False where the C library has no such call (it is glibc's)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    trim.argtypes = [ctypes.c_size_t]
    return bool(trim(0))
