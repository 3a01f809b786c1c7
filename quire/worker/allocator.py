"""Makes the C allocator keep freed memory for the next step. Called once per worker, beside the thread count.

A step allocates and frees the same buffers of some MiB over and over. By default the C library returns them to the
operating system each time, and every next use pays for zeroed blocks again: more than the arithmetic on them.
The setting belongs to the process, as the thread count does.
"""

from __future__ import annotations

import ctypes

from quire.utils.memory import MIB

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks below this come from the heap, the largest value that glibc accepts; larger ones are mapped and unmapped.
MMAP_THRESHOLD_BYTES = 32 * MIB
# Free memory at the top of the heap that is kept.
TRIM_THRESHOLD_BYTES = 256 * MIB


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 32 MiB; False, and nothing done, with another C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
