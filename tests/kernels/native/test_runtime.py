"""Which tier is chosen, and what happens where one does not work."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, NativeLibraryError
from quire.kernels.native import library as native
from quire.kernels.native.library import EMULATED_TIER, choose_tier, examine_tiers, load_library, supported_tiers
from quire.kernels.native.runtime import NativeRuntime

ROOT = Path(__file__).parents[3]
FAULTS = {
    1: "ended by signal 4",
    2: "ended by signal 11",
    3: "took longer than 300 ms",
    4: "other bits than the portable tier",
}


def test_auto_takes_the_best_tier_that_runs(monkeypatch):
    monkeypatch.delenv("QUIRE_KERNEL_TIER", raising=False)
    assert choose_tier("auto") == supported_tiers()[0] == NativeRuntime("auto").tier
    assert supported_tiers()[-1] == "portable" and EMULATED_TIER not in supported_tiers()


@pytest.mark.parametrize("name", [*supported_tiers(), EMULATED_TIER])
def test_every_tier_that_runs_passes_its_self_test_and_can_be_forced(name: str):
    library = load_library()
    assert library.self_test(library.tier_names().index(name), 10_000, 0) == ""
    assert NativeRuntime(name).tier == name


def test_auto_takes_the_tier_of_the_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_KERNEL_TIER", "portable")
    assert choose_tier("auto") == NativeRuntime().tier == "portable"
    assert choose_tier(supported_tiers()[0]) == supported_tiers()[0]  # what is asked for by name counts more
    monkeypatch.setenv("QUIRE_KERNEL_TIER", "avx513")
    with pytest.raises(ConfigError, match="unknown kernel tier 'avx513'"):
        choose_tier("auto")


def test_an_unknown_tier_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown kernel tier 'avx513'") as caught:
        choose_tier("avx513")
    assert "avx512" in str(caught.value.hint)


@pytest.mark.parametrize("fault", FAULTS, ids=["illegal instruction", "bad access", "hang", "wrong result"])
def test_a_tier_that_fails_in_the_child_does_not_harm_the_parent(fault: int):
    library = load_library()
    reason = library.self_test(library.tier_names().index("portable"), 300, fault)
    assert FAULTS[fault] in reason and "in case 'products'" in reason


@pytest.mark.parametrize("kernel", load_library().idle_kernel_names())
def test_a_tier_whose_kernel_does_nothing_fails_its_self_test(kernel: str):
    library = load_library()
    number = library.idle_kernel_names().index(kernel)
    reason = library.self_test(library.tier_names().index("portable"), 10_000, 5, number)
    assert "other bits than the portable tier" in reason


def test_the_self_test_calls_every_kernel():
    code = "\n".join(header.read_text() for header in (ROOT / "csrc/include/quire").glob("*.h"))
    tables = re.findall(r"struct (?!SelfTest)\w+Kernels \{(.*?)\};", code, re.DOTALL)
    kernels = re.findall(r"\(\*(\w+)\)\(", "".join(tables))
    assert set(load_library().idle_kernel_names()) == set(kernels) - {"run_ceiling"}


class FakeLibrary:
    """Three tiers, of which the CPU offers two; `failures` says what their self-tests answer."""

    def __init__(self, **failures: str) -> None:
        self.failures = failures
        self.num_tests = 0

    def tier_names(self) -> list[str]:
        return ["best", "good", "portable"]

    def is_tier_supported(self, index: int) -> bool:
        return index > 0

    def self_test(self, index: int, timeout_ms: int, fault: int) -> str:
        self.num_tests += 1
        return self.failures.get(self.tier_names()[index], "")


def use(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.delenv("QUIRE_KERNEL_TIER", raising=False)
    monkeypatch.setattr(native, "load_library", lambda: library)


def test_a_tier_that_fails_its_self_test_is_passed_over_with_a_warning(monkeypatch, caplog):
    use(monkeypatch, FakeLibrary(good="its self-test was terminated by signal 4"))
    with caplog.at_level(logging.WARNING, "quire"):
        assert choose_tier("auto") == "portable"
    assert [record.getMessage() for record in caplog.records] == [
        "kernel tier good is not used: its self-test was terminated by signal 4"
    ]
    with pytest.raises(
        ConfigError, match="'good' does not run on this machine: its self-test was terminated by signal 4"
    ):
        choose_tier("good")
    with pytest.raises(ConfigError, match="'best' does not run on this machine: the CPU or the operating system"):
        choose_tier("best")


def test_tiers_are_tested_once_per_process(monkeypatch):
    library = FakeLibrary()
    use(monkeypatch, library)
    assert choose_tier("auto") == choose_tier("auto") == "good"
    assert library.num_tests == 1


def test_a_library_that_is_not_built_says_what_to_install(monkeypatch):
    monkeypatch.delenv("QUIRE_NATIVE_LIBRARY", raising=False)
    monkeypatch.delitem(sys.modules, native.MODULE_NAME)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    with pytest.raises(NativeLibraryError, match="cannot be loaded: it was not built") as caught:
        load_library()
    assert "apt-get install g++" in str(caught.value.hint)
    assert native.tier_problems() == {}


def load_other(path: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "from quire.kernels.native.library import load_library; l = load_library(); l.tier_names(); print(l.__file__)"
    )
    search_path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": search_path, "QUIRE_NATIVE_LIBRARY": str(path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_another_build_is_loaded_where_it_is_named(tmp_path: Path):
    own = Path(load_library().__file__)
    copy = tmp_path / own.name
    shutil.copy(own, copy)
    assert load_other(copy).stdout.strip() == str(copy)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "folder"])
def test_a_library_that_is_missing_or_damaged_is_an_error_that_says_what_to_do(damage: str, tmp_path: Path):
    own = Path(load_library().__file__)
    path = tmp_path / ("notes.txt" if damage == "text" else own.name)
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "cut": own.read_bytes()[:5000], "text": b"hello"}[damage])
    result = load_other(path)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-2:]
    assert "NativeLibraryError: the native kernels cannot be loaded" in last[0] and str(path) in last[0]
    assert "QUIRE_NATIVE_LIBRARY" in last[1] and "install quire again" in last[1]


def test_spawned_and_forked_processes_find_the_same_tiers(tmp_path: Path):
    code = (
        "import multiprocessing as mp, sys\n"
        "from quire.kernels.native.library import supported_tiers\n"
        "def ask(queue): queue.put(supported_tiers())\n"
        "if __name__ == '__main__':\n"
        "    found = [supported_tiers()]\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = mp.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        child = context.Process(target=ask, args=(queue,))\n"
        "        child.start(); found.append(queue.get(timeout=60)); child.join()\n"
        "    sys.exit(not (found[0] == found[1] == found[2]))\n"
    )
    script = tmp_path / "probe.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, str(script)], env=environment, check=False).returncode == 0


def test_examining_all_tiers_takes_little_time():
    native._examine.cache_clear()
    before = os.times()
    examine_tiers()
    assert sum(os.times()[:4]) - sum(before[:4]) < 10, "of CPU time, with that of children; it takes well under one"
