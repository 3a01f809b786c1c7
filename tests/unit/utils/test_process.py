"""What is read of processes, from a /proc of the test's own and from the system's."""

from __future__ import annotations

import os
from pathlib import Path

from quire.utils.process import MappedMemory, read_counters, read_mapped

STAT = "7 (a) name) S 1 7 7 0 -1 4194304 100 0 5 0 250 50 0 0 20 0 9 0 1200 1000000 300 18446744073709551615"


def test_the_counters_of_a_process_are_read_whatever_its_name(tmp_path: Path):
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "stat").write_text(STAT)
    for name in "012":
        (tmp_path / "7" / "fd" / name).touch()
    found, ticks = read_counters(7, tmp_path), os.sysconf("SC_CLK_TCK")
    assert found is not None
    assert (found.minor_faults, found.major_faults, found.num_threads, found.num_fds) == (100, 5, 9, 3)
    assert (found.user_s, found.system_s, found.start_s) == (250 / ticks, 50 / ticks, 1200 / ticks)
    assert found.rss_bytes == 300 * os.sysconf("SC_PAGE_SIZE")


def test_memory_in_huge_pages_is_summed_over_its_kinds(tmp_path: Path):
    (tmp_path / "7").mkdir()
    lines = ["1000-2000 ---p 00000000 00:00 0 [rollup]", "Pss: 30 kB", "AnonHugePages: 4 kB", "ShmemPmdMapped: 2 kB"]
    (tmp_path / "7" / "smaps_rollup").write_text("\n".join([*lines, "FilePmdMapped: 0 kB", "Swap: 1 kB"]))
    assert read_mapped(7, tmp_path) == MappedMemory(30 << 10, 6 << 10, 1 << 10)


def test_a_process_that_has_ended_is_none(tmp_path: Path):
    assert read_counters(7, tmp_path) is None and read_mapped(7, tmp_path) is None
    own = read_counters(os.getpid())
    assert own is not None and own.rss_bytes > 1 << 20 and own.minor_faults > 0
