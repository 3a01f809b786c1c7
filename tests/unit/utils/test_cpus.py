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

    def node(self, node: int, cpus: str) -> FakeMachine:
        folder = self.root / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        return self

    def speed(self, cpus: str, speed: int, file: str = "cpu_capacity") -> FakeMachine:
        for cpu in self.expand(cpus):
            path = self.root / "cpu" / f"cpu{cpu}" / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{speed}\n")
        return self

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


def test_of_many_cores_without_siblings_one_is_left_to_python(tmp_path):
    assert FakeMachine(tmp_path / "a", *map(str, range(7))).read(*range(7)).num_threads == 7
    assert FakeMachine(tmp_path / "b", *map(str, range(8))).read(*range(8)).num_threads == 7
    with_siblings = FakeMachine(tmp_path / "c", *(f"{cpu},{cpu + 8}" for cpu in range(8)))
    assert with_siblings.read(*range(16)).num_threads == 8


class TestPlacement:
    def test_one_thread_a_core_leaves_the_siblings_alone(self, tmp_path):
        machine = FakeMachine(tmp_path, "0,4", "1,5", "2,6", "3,7").node(0, "0-7")
        assert machine.read(*range(8)).compute_cpus(4) == (0, 1, 2, 3)
        assert machine.read(*range(8)).compute_cpus(2) == (0, 1)

    def test_neighbouring_siblings_are_left_alone_too(self, tmp_path):
        assert FakeMachine(tmp_path, "0-1", "2-3").read(0, 1, 2, 3).compute_cpus(2) == (0, 2)

    def test_few_threads_stay_on_one_memory_node(self, tmp_path):
        machine = FakeMachine(tmp_path, *map(str, range(8))).node(0, "0-3").node(1, "4-7")
        assert machine.read(*range(8)).compute_cpus(4) == (0, 1, 2, 3)
        assert machine.read(*range(2, 8)).compute_cpus(4) == (4, 5, 6, 7)
        assert machine.read(*range(2, 8)).compute_cpus(2) == (2, 3)
        assert machine.read(*range(8)).compute_cpus(6) == (0, 1, 2, 3, 4, 5)

    def test_a_cpuset_that_crosses_nodes_is_filled_from_its_larger_part(self, tmp_path):
        machine = FakeMachine(tmp_path, *map(str, range(8))).node(0, "0-3").node(1, "4-7")
        assert machine.read(3, 4, 5, 6).compute_cpus(4) == (4, 5, 6, 3)
        assert machine.read(3, 4, 5, 6).num_nodes == 2

    def test_two_sockets_with_interleaved_numbers_and_siblings(self, tmp_path):
        cores = [f"{cpu},{cpu + 8}" for cpu in range(8)]
        machine = FakeMachine(tmp_path, *cores).node(0, "0,2,4,6,8,10,12,14").node(1, "1,3,5,7,9,11,13,15")
        assert machine.read(*range(16)).compute_cpus(4) == (0, 2, 4, 6)
        assert machine.read(*range(16)).compute_cpus(8) == (0, 2, 4, 6, 1, 3, 5, 7)

    def test_ranks_are_spread_over_memory_nodes(self, tmp_path):
        cores = [f"{core},{core + 8}" for core in range(8)]
        machine = FakeMachine(tmp_path, *cores).node(0, "0-3,8-11").node(1, "4-7,12-15").read(*range(16))
        assert [machine.rank_cpus(rank, 2, 4) for rank in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert [machine.rank_cpus(rank, 2, 2) for rank in range(2)] == [(0, 1), (4, 5)]
        assert [machine.rank_cpus(rank, 4, 2) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
        assert [machine.rank_cpus(rank, 3, 2) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
        assert machine.rank_cpus(1, 2, 8) == ()  # more threads than cores
        assert machine.cpus_of_nodes((4, 5)) == (4, 12, 5, 13, 6, 14, 7, 15)

    def test_ranks_of_one_memory_node_have_cores_of_their_own_where_there_are_siblings(self, tmp_path):
        machine = FakeMachine(tmp_path, "0,2", "1,3").read(*range(4))
        assert [machine.rank_cpus(rank, 2, 1) for rank in range(2)] == [(0,), (1,)]
        assert FakeMachine(tmp_path / "plain", "0", "1").read(0, 1).rank_cpus(1, 2, 1) == ()

    @pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
    def test_the_fast_cores_of_a_hybrid_machine_come_first(self, tmp_path, file: str):
        machine = FakeMachine(tmp_path, "0", "1", "2", "3").speed("0-1", 400, file).speed("2-3", 1024, file)
        assert machine.read(0, 1, 2, 3).compute_cpus(2) == (2, 3)
        assert machine.read(0, 1, 2, 3).compute_cpus(4) == ()

    def test_where_all_cpus_are_alike_the_scheduler_places_threads(self, tmp_path):
        assert FakeMachine(tmp_path, "0", "1").node(0, "0-1").read(0, 1).compute_cpus(2) == ()

    def test_nothing_is_bound_without_a_choice(self, tmp_path):
        machine = FakeMachine(tmp_path, "0,2", "1,3")
        assert machine.read(0, 1, 2, 3).compute_cpus(1) == ()
        assert machine.read(0, 1, 2, 3).compute_cpus(3) == (), "more threads than cores"
        machine.quota("0::/a", "a", cpu__max="150000 100000")
        cpus = machine.read(0, 1, 2, 3)
        assert cpus.num_threads == 2 and cpus.compute_cpus(2) == (), "a quota lets no CPU run all the time"

    def test_without_sysfs_every_cpu_is_a_core_of_one_node(self, tmp_path):
        cpus = FakeMachine(tmp_path).read(0, 1, 2)
        assert (cpus.num_cores, cpus.num_nodes, cpus.has_siblings, cpus.compute_cpus(3)) == (3, 1, False, ())

    def test_offline_cpus_do_not_count(self, tmp_path):
        machine = FakeMachine(tmp_path, "0,4", "1,5", "2", "3")
        (tmp_path / "cpu" / "online").write_text("0-2,4-5\n")
        cpus = machine.read(*range(6))
        assert cpus.ids == (0, 1, 2, 4, 5) and cpus.num_threads == 3 and cpus.compute_cpus(3) == (0, 1, 2)

    def test_what_is_known_fits_in_a_line(self, tmp_path):
        machine = FakeMachine(tmp_path, "0,2", "1,3").node(0, "0,2").node(1, "1,3")
        assert machine.read(0, 1, 2, 3).describe() == ("4 CPUs on 2 cores of 2 memory nodes, with siblings, no quota")


def test_the_real_machine_can_be_read():
    assert 1 <= read_usable_cpus().num_threads <= len(read_usable_cpus().ids)
