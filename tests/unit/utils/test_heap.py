"""Giving memory back to the system."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest

from quire.utils.heap import give_back_free_memory, map_large_blocks


class Body:
    """Stands for a large body, held by a cycle as an error and its traceback hold one."""

    def __init__(self) -> None:
        self.itself = self


def test_what_only_a_cycle_holds_is_given_back():
    body = weakref.ref(Body())
    give_back_free_memory()
    assert body() is None


ROUNDS = """
from pathlib import Path
from quire.utils.heap import LARGE_BYTES, map_large_blocks

def resident_bytes():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024

assert map_large_blocks()
for _ in range(2):  # by default the second round stays in the heap
    before = resident_bytes()
    blocks = [b"x" * (2 * LARGE_BYTES) for _ in range(16)]
    held = blocks[-1]
    del blocks
    assert resident_bytes() - before < 16 * LARGE_BYTES, resident_bytes() - before
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_large_blocks_are_returned_when_they_are_freed_also_below_one_that_stays():
    if not map_large_blocks():
        pytest.skip("the C library is not glibc")
    # In a process of its own: the heap of a test run has free blocks below, and other threads allocate meanwhile.
    subprocess.run([sys.executable, "-c", ROUNDS], check=True)
