"""Which tier is chosen, and what happens where one does not work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
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


def test_auto_takes_the_best_tier_that_runs():
    assert choose_tier("auto") == supported_tiers()[0] == NativeRuntime("auto").tier
    assert supported_tiers()[-1] == "portable" and EMULATED_TIER not in supported_tiers()


@pytest.mark.parametrize("name", [*supported_tiers(), EMULATED_TIER])
def test_every_tier_that_runs_passes_its_self_test_and_can_be_forced(name: str):
    library = load_library()
    assert library.self_test(library.tier_names().index(name), 10_000, 0) == ""
    assert NativeRuntime(name).tier == name


def test_an_unknown_tier_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown kernel tier 'avx513'") as caught:
        choose_tier("avx513")
    assert "avx512" in str(caught.value.hint)


@pytest.mark.parametrize("fault", FAULTS, ids=["illegal instruction", "bad access", "hang", "wrong result"])
def test_a_tier_that_fails_in_the_child_does_not_harm_the_parent(fault: int):
    library = load_library()
    reason = library.self_test(library.tier_names().index("portable"), 300, fault)
    assert FAULTS[fault] in reason and "in case 'products'" in reason


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
    monkeypatch.setattr(native, "load_library", lambda: library)


def test_a_tier_that_fails_its_self_test_is_passed_over_with_a_warning(monkeypatch, caplog):
    use(monkeypatch, FakeLibrary(good="its self-test was ended by signal 4"))
    with caplog.at_level(logging.WARNING, "quire"):
        assert choose_tier("auto") == "portable"
    assert [record.getMessage() for record in caplog.records] == [
        "kernel tier good is not used: its self-test was ended by signal 4"
    ]
    with pytest.raises(ConfigError, match="'good' does not run on this machine: its self-test was ended by signal 4"):
        choose_tier("good")
    with pytest.raises(ConfigError, match="'best' does not run on this machine: the CPU or the operating system"):
        choose_tier("best")


def test_tiers_are_tested_once_per_process(monkeypatch):
    library = FakeLibrary()
    use(monkeypatch, library)
    assert choose_tier("auto") == choose_tier("auto") == "good"
    assert library.num_tests == 1


def test_a_library_that_is_not_built_says_what_to_install(monkeypatch):
    def fail(name: str) -> Any:
        raise ImportError("no such file")

    monkeypatch.setattr(native, "import_module", fail)
    with pytest.raises(NativeLibraryError, match="cannot be loaded: no such file") as caught:
        load_library()
    assert "apt-get install g++" in str(caught.value.hint)
    assert native.tier_problems() == {}


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
    started = time.perf_counter()
    examine_tiers()
    assert time.perf_counter() - started < 2
