"""`quire doctor` names what is planted: on a machine, in files that describe it, and in a server's settings."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cli import doctor
from quire.cli.doctor_checks import CHECKS, FAILS, RISK, SLOW, check_disk, check_machine
from quire.cli.doctor_facts import Facts, Folder, read_facts, read_folder
from quire.cli.main import main
from quire.kernels.native.library import NOT_OFFERED, TierReport
from quire.platforms.interface import Platform
from quire.utils.cpus import Core, UsableCpus
from quire.utils.memory import GIB, MemoryInfo

CPUS = UsableCpus(ids=(0, 1, 2, 3), cores=(Core((0, 1)), Core((2, 3))), quota=None)
MACHINE = Platform(
    device="cpu", cpu_name="Test CPU", cpu_flags=frozenset({"avx2"}), num_cpus=2, cpus=CPUS,
    memory=MemoryInfo(total_bytes=64 * GIB, available_bytes=32 * GIB, limited_by="/proc/meminfo"),
)  # fmt: skip
CACHE = Folder(path="/home/me/.cache/quire", is_writable=True, free_bytes=100 * GIB)
HEALTHY = Facts(
    machine=MACHINE, tiers=(TierReport("avx512", NOT_OFFERED), TierReport("avx2", None), TierReport("portable", None)),
    tier="avx2", huge_pages="madvise", governors=frozenset({"performance"}), clock_source="tsc", load=0.3,
    cache=CACHE, temporary=Folder(path="/tmp", is_writable=True, free_bytes=GIB),
    packages={"torch": "2.11.0+cpu", "xgrammar": "0.2.8", "llguidance": None},
)  # fmt: skip


def machine(**changes: Any) -> Facts:
    return replace(HEALTHY, machine=replace(MACHINE, **changes))


def memory(available: int) -> Facts:
    return machine(memory=MemoryInfo(total_bytes=64 * GIB, available_bytes=available, limited_by="/sys/fs/cgroup/x"))


SMALL = Folder(path="/full", is_writable=True, free_bytes=1 << 20)
PLANTED = {
    "native-library": replace(HEALTHY, tiers=(), tier="", native_problem="it was built for another Python"),
    "broken-tier": replace(HEALTHY, tiers=(TierReport("amx", "its kernels were killed"), *HEALTHY.tiers)),
    "forced-tier": replace(HEALTHY, tier="portable", environment={"QUIRE_KERNEL_TIER": "portable"}),
    "no-vector-instructions": replace(
        HEALTHY, tiers=(TierReport("avx2", NOT_OFFERED), TierReport("portable", None)), tier="portable"
    ),
    "torch": replace(HEALTHY, packages={"torch": None, "xgrammar": "1"}),
    "structured-output": replace(HEALTHY, packages={"torch": "2.11.0+cpu", "xgrammar": None, "llguidance": None}),
    "memory": memory(GIB // 2),
    "swapped-memory": replace(HEALTHY, swapped_bytes=8 * GIB),
    "overcommit": replace(HEALTHY, overcommit=2),
    "huge-pages": replace(HEALTHY, huge_pages="never"),
    "cpu-quota": machine(cpus=replace(CPUS, quota=1.5)),
    "one-core": machine(cpus=UsableCpus(ids=(0,), cores=(Core((0,)),), quota=None)),
    "omp-num-threads": replace(HEALTHY, environment={"OMP_NUM_THREADS": "1"}),
    "cpu-governor": replace(HEALTHY, governors=frozenset({"powersave", "performance"})),
    "other-load": replace(HEALTHY, load=3.0),
    "stolen-time": replace(HEALTHY, steal_share=0.2),
    "memory-nodes": machine(cpus=replace(CPUS, cores=(Core((0, 1)), Core((2, 3), node=1)))),
    "clock-source": replace(HEALTHY, clock_source="hpet"),
    "open-files": replace(HEALTHY, open_files=256),
    "max-pids": replace(HEALTHY, max_pids=64),
    "cache-directory": replace(HEALTHY, cache=replace(CACHE, is_writable=False)),
    "cache-space": replace(HEALTHY, cache=SMALL),
    "temporary-directory": replace(HEALTHY, temporary=replace(CACHE, path="/" + 80 * "x")),
    "cuda-torch-without-gpu": replace(HEALTHY, torch_is_cuda=True),
    "unused-gpu": replace(HEALTHY, gpu_devices=("/dev/nvidia0",)),
}


def test_a_healthy_machine_has_no_findings_and_every_check_has_a_plant():
    assert not list(check_machine(HEALTHY))
    assert set(PLANTED) == set(CHECKS) and len(PLANTED) >= 20


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_is_named_alone_with_its_fix(name):
    (found,) = check_machine(PLANTED[name])
    assert found.name == name and found.kind in (FAILS, SLOW) and len(found.what) > 20 and len(found.fix) > 5


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def test_facts_are_read_from_the_files_that_the_system_has(tmp_path):
    proc = write(tmp_path / "proc", {
        "cpuinfo": "processor : 0\nmodel name : Old CPU\nflags : sse2", "loadavg": "99.50 1.0 1.0 2/100 1",
        "meminfo": "MemTotal: 8000000 kB\nMemFree: 300000 kB\nMemAvailable: 400000 kB\nSwapTotal: 4000000 kB\n"
            "SwapFree: 1000000 kB",
        "stat": "cpu 50 0 20 0 10 0 0 20 0 0\ncpu0 1 1 1 1", "sys/vm/overcommit_memory": "2", "self/cgroup": "0::/",
        "mounts": f"overlay / overlay rw 0 0\nhost:/x {tmp_path} nfs4 rw 0 0\n",
    })  # fmt: skip
    sys = write(tmp_path / "sys", {
        "kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "devices/system/clocksource/clocksource0/current_clocksource": "acpi_pm",
    })  # fmt: skip
    cgroup = write(tmp_path / "cgroup", {"pids.max": "100"})
    for number in range(256):
        write(sys, {f"devices/system/cpu/cpu{number}/cpufreq/scaling_governor": "powersave"})
    facts = read_facts(proc, sys, cgroup)
    names = {one.name for one in check_machine(facts)}
    assert names >= {
        "memory", "swapped-memory", "overcommit", "huge-pages", "cpu-governor", "other-load", "stolen-time",
        "clock-source", "max-pids",
    }  # fmt: skip
    assert facts.steal_share == pytest.approx(0.2) and facts.swapped_bytes == 3_000_000 << 10
    (slow,) = check_disk("kv-disk", read_folder(tmp_path / "not" / "made", proc))
    assert "nfs4" in slow.what and slow.kind == SLOW


@pytest.fixture
def healthy(monkeypatch):
    monkeypatch.setattr(doctor, "read_facts", lambda: HEALTHY)


def findings(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", *argv, "--json"])
    return code, {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_settings_that_would_fail_or_are_not_safe_are_named(healthy, capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("abcdefgh-1234\n")
    keys.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, found = findings(capsys, "leaf", "--port", port, "--api-key-file", str(keys), "--api-key", "k" * 12)
    assert code == 1 and set(found) == {"address", "readable-keys", "visible-key"}
    assert found["address"]["kind"] == FAILS and found["readable-keys"]["kind"] == RISK
    code, found = findings(capsys, "leaf", "--port", "0", "--host", "0.0.0.0")
    assert code == 0 and set(found) == {"open-address"}
    file = tmp_path / "file"
    file.write_text("")
    code, found = findings(capsys, "leaf", "--port", "0", "--kv-disk", str(file))
    assert code == 1 and found["kv-disk"]["kind"] == FAILS
    code, found = findings(capsys, "leaf", "--port", "0", "--flight-recorder", "/dev/shm/quire")
    assert code == 0 and found["flight-recorder"]["kind"] == SLOW and "tmpfs" in found["flight-recorder"]["what"]


@pytest.mark.parametrize(
    ("argv", "name", "words"),
    [
        (["-dp", "3"], "ranks", "3 processes"),
        (["--api-server-count", "4"], "front-ends", "4 front ends next to 1"),
        (["-pp", "2"], "pipeline-stages", "one machine"),
        (["-pp", "2", "--max-num-seqs", "1"], "pipeline-stages", "1 of 2 stages"),
        (["--enable-expert-parallel"], "expert-parallel", "one rank"),
        (["-tp", "2", "--executor", "ray"], "ray", "not installed"),
        (["--enable-sleep-mode"], "sleep-mode", "anew"),
        (["--profile", "FILE"], "profile", "cannot be written"),
    ],
)  # fmt: skip
def test_processes_that_this_machine_is_too_small_for_are_named(monkeypatch, capsys, tmp_path, argv, name, words):
    cache = replace(CACHE, is_writable=name != "sleep-mode")
    monkeypatch.setattr(doctor, "read_facts", lambda: replace(HEALTHY, cache=cache))
    (tmp_path / "file").write_text("")
    argv = [str(tmp_path / "file") if one == "FILE" else one for one in argv]
    _, found = findings(capsys, "leaf", "--port", "0", *argv)
    also = {"sleep-mode": "cache-directory", "expert-parallel": "model"}.get(name, "")  # leaf has no experts
    assert set(found) - {also} == {name} and words in found[name]["what"] and len(found[name]["fix"]) > 20
    code, found = findings(capsys, "leaf", "--port", "0", "-tp", "2", "--api-server-count", "2")
    assert code == 0 and set(found) <= {"cache-directory"}


@pytest.mark.parametrize(
    ("argv", "name", "words"),
    [
        (["--max-model-len", "900000"], "model", "max_model_len"),
        (["--max-num-seqs", "0"], "settings", "max_num_seqs"),
        (["--ssl-certfile", "/no/such.pem"], "files", "/no/such.pem"),
        (["--tool-call-parser", "nothing"], "files", "nothing"),
    ],
)
def test_what_a_start_would_refuse_is_named_with_its_hint(healthy, capsys, argv, name, words):
    code, found = findings(capsys, "leaf", "--port", "0", *argv)
    assert code == 1 and set(found) == {name} and words in found[name]["what"] and found[name]["fix"]


def test_a_model_that_is_not_there_is_named_and_lines_are_for_people(healthy, capsys, tmp_path):
    assert main(["doctor", str(tmp_path / "none" / "model"), "--port", "0"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("fails model: ") and "      fix: " in shown and "1 finding\n" in shown
    assert main(["doctor", "leaf", "--port", "0"]) == 0
    assert "no findings" in capsys.readouterr().out
