from __future__ import annotations

from pathlib import Path

import pytest

from quire.utils.memory import format_bytes, read_huge_page_mode, read_memory

MB = 1 << 20


class FakeMachine:
    """A /proc and a /sys/fs/cgroup in a temporary folder."""

    def __init__(self, root: Path, *, total_mb: int = 4096, available_mb: int = 3000) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        text = f"MemTotal: {total_mb * 1024} kB\nMemFree: 10 kB\nMemAvailable: {available_mb * 1024} kB\nHugePages: 0\n"
        (self.proc / "meminfo").write_text(text)

    def in_cgroup(self, *lines: str) -> FakeMachine:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")
        return self

    def write(self, directory: str, **files: object) -> FakeMachine:
        folder = self.cgroup / directory
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")
        return self

    def read(self) -> tuple[int, int, str]:
        """(total MB, available MB, what limited it)."""
        info = read_memory(self.proc, self.cgroup)
        return info.total_bytes // MB, info.available_bytes // MB, info.limited_by


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_cgroups_the_system_decides(machine: FakeMachine) -> None:
    assert machine.read() == (4096, 3000, str(machine.proc / "meminfo"))


def test_a_v2_limit_less_its_usage_decides_when_it_is_tighter(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/app").write("app", memory__max=1000 * MB, memory__current=400 * MB)
    assert machine.read() == (1000, 600, str(machine.cgroup / "app"))


def test_file_pages_that_can_be_dropped_count_as_free(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/app").write(
        "app", memory__max=1000 * MB, memory__current=900 * MB, memory__stat=f"anon 5\ninactive_file {700 * MB}\n"
    )
    assert machine.read()[1] == 800


def test_the_tightest_cgroup_on_the_way_up_decides(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/slice/app/inner")
    machine.write("slice", memory__max=800 * MB, memory__current=500 * MB)
    machine.write("slice/app", memory__max=700 * MB, memory__current=100 * MB)
    machine.write("slice/app/inner", memory__max="max", memory__current=100 * MB)
    assert machine.read() == (700, 300, str(machine.cgroup / "slice"))


def test_a_soft_limit_that_slows_the_process_down_counts(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/a").write("a", memory__max=900 * MB, memory__high=600 * MB, memory__current=0)
    assert machine.read()[1] == 600


def test_a_container_that_sees_only_its_own_cgroup_is_understood(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/").write(".", memory__max=512 * MB, memory__current=12 * MB)
    assert machine.read()[1] == 500
    machine.in_cgroup("0::/docker/path-that-is-not-mounted-here")
    assert machine.read()[1] == 500


def test_v1_limits_are_read_with_their_own_names(machine: FakeMachine) -> None:
    machine.in_cgroup("5:memory:/job/1", "3:cpu,cpuacct:/job", "0::/")
    machine.write("memory/job/1", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=50 * MB)
    machine.write(
        "memory/job",
        memory__limit_in_bytes=900 * MB,
        memory__usage_in_bytes=300 * MB,
        memory__stat=f"total_inactive_file {100 * MB}",
    )
    assert machine.read() == (900, 700, str(machine.cgroup / "memory" / "job"))


def test_a_full_cgroup_leaves_nothing(machine: FakeMachine) -> None:
    machine.in_cgroup("0::/a").write("a", memory__max=100 * MB, memory__current=130 * MB)
    assert machine.read()[1] == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(5, "5 bytes"), (2048, "2.0 KiB"), (3 * MB, "3.0 MiB"), (-2048 * MB, "-2.0 GiB"), (5 << 40, "5120.0 GiB")],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "mode"), [("always [madvise] never\n", "madvise"), ("", "unknown"), (None, "unknown")]
)
def test_the_mode_of_huge_pages_is_read(tmp_path: Path, text: str | None, mode: str) -> None:
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "enabled").write_text(text)
    assert read_huge_page_mode(tmp_path) == mode
