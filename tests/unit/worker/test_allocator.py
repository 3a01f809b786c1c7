from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.allocator import keep_freed_memory

# Allocates and frees 16 MiB fifty times, and prints how many blocks were faulted in after the first five.
COUNT_FAULTS = """
import resource, sys, torch
from quire.worker.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for number in range(50):
    torch.ones(4 << 20)
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_buffers_are_used_again_instead_of_being_returned() -> None:
    assert keep_freed_memory()
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", COUNT_FAULTS, "keep"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 5 * 4096  # 45 buffers of 4096 blocks were used
