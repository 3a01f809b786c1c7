from __future__ import annotations

from pathlib import Path

import pytest

from quire.utils.cpus import UsableCpus, read_usable_cpus


class FakeMachine:
    """CPUs, cores and cgroups in a temporary folder; `siblings` lists the CPUs of each core."""

    def __init__(self, root: Path, *siblings: str, file: str = "core_cpus_list") -> None:
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        (root / "cgroup").mkdir()
        for core in siblings:
            for cpu in self.expand(core):
                folder = root / "cpu" / f"cpu{cpu}" / "topology"
                folder.mkdir(parents=True)
                (folder / file).write_text(f"{core}\n")

    @staticmethod
    def expand(core: str) -> list[int]:
        ranges = [part.partition("-") for part in core.split(",")]
        return [cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)]

    def quota(self, line: str, directory: str, **files: object) -> FakeMachine:
        (self.root / "proc" / "self" / "cgroup").write_text(f"{line}\n")
        folder = self.root / "cgroup" / directory
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")
        return self

    def read(self, *affinity: int) -> UsableCpus:
        return read_usable_cpus(self.root / "proc", self.root / "cgroup", self.root / "cpu", affinity)


@pytest.mark.parametrize(
    ("siblings", "affinity", "num_threads"),
    [
        pytest.param(["0", "1"], [0, 1], 2, id="two cores without multithreading"),
        pytest.param(["0-1", "2-3"], [0, 1, 2, 3], 2, id="neighbours share a core"),
        pytest.param(["0,4", "1,5", "2,6", "3,7"], range(8), 4, id="siblings are numbered last"),
        pytest.param(["0,4", "1,5", "2,6", "3,7"], [0, 1, 4], 2, id="a cpuset cuts through a core"),
        pytest.param(["0,4", "1,5", "2,6", "3,7"], [4, 5, 6, 7], 4, id="only second siblings are allowed"),
        pytest.param(["0,4", "2,6", "3,7"], [0, 2, 3, 4, 6, 7], 3, id="a core is offline"),
        pytest.param(["0-3", "4-7"], range(8), 2, id="four threads a core"),
        pytest.param(["0", "1", "64,65"], [0, 1, 64, 65], 3, id="fast and slow cores together"),
        pytest.param(["5"], [5], 1, id="pinned to one CPU"),
        pytest.param([], [0, 1, 2], 3, id="no topology is known"),
    ],
)
def test_one_thread_runs_per_usable_core(tmp_path, siblings, affinity, num_threads):
    cpus = FakeMachine(tmp_path, *siblings).read(*affinity)
    assert cpus.num_threads == num_threads
    assert cpus.ids == tuple(sorted(affinity))


def test_older_kernels_name_siblings_otherwise(tmp_path):
    assert FakeMachine(tmp_path, "0-1", file="thread_siblings_list").read(0, 1).num_cores == 1


@pytest.mark.parametrize(
    ("line", "directory", "files", "num_threads"),
    [
        pytest.param("0::/a", "a", {"cpu__max": "max 100000"}, 4, id="version 2 without quota"),
        pytest.param("0::/a", "a", {"cpu__max": "50000 100000"}, 1, id="version 2, half a CPU"),
        pytest.param("0::/a/b", "a", {"cpu__max": "250000 100000"}, 3, id="version 2, of a parent"),
        pytest.param("4:cpu,cpuacct:/b", "cpu,cpuacct/b", {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}, 4,
                     id="version 1 without quota"),
        pytest.param("4:cpu:/b", "cpu/b", {"cpu__cfs_quota_us": 180000, "cpu__cfs_period_us": 100000}, 2,
                     id="version 1, 1.8 CPUs"),
    ],
)  # fmt: skip
def test_a_quota_of_either_cgroup_version_bounds_the_threads(tmp_path, line, directory, files, num_threads):
    machine = FakeMachine(tmp_path, "0", "1", "2", "3").quota(line, directory, **files)
    assert machine.read(0, 1, 2, 3).num_threads == num_threads


def test_the_real_machine_can_be_read():
    assert 1 <= read_usable_cpus().num_threads <= len(read_usable_cpus().ids)
