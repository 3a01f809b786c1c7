"""A child imports nothing from the directory that somebody happens to stand in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.structured_output.compile import worker_process
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.pool import CompilePool
from quire.structured_output.compile.worker import EXIT_OVER_MEMORY, OVER_MEMORY, OVER_TIME, result_of_death
from quire.structured_output.interface import GrammarSpec
from quire.utils import children
from quire.utils.children import describe_exit, search_path, start_module

LEAF = str(Path(children.PACKAGE_ROOT) / "quire" / "assets" / "leaf")
NAMES = (
    "msgspec", "json", "numpy", "zmq", "re", "signal", "importlib", "quire", "sitecustomize", "usercustomize", "torch",
    "xgrammar", "llguidance", "tokenizers", "encodings", "runpy", "multiprocessing", "types", "os", "site",
)  # fmt: skip
PLAIN = GrammarSpec(kind="regex", text="[a-f]{3}", backend="xgrammar")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which has modules of many names; each leaves a file when it is imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def what_ran(directory: Path) -> str:
    marker = directory / "was_run"
    return marker.read_text() if marker.exists() else ""


def test_a_grammar_is_compiled_without_the_modules_of_the_current_directory(hostile: Path):
    pool = CompilePool(WorkerSetup(LEAF, 3072, 2, 2.0, 400 << 20))
    try:
        pool.compile(PLAIN).result()
    finally:
        pool.close()
    assert what_ran(hostile) == ""


@pytest.mark.parametrize("module", ["quire.engine.core_proc", "quire.bench.processes"])
@pytest.mark.parametrize("uses_current_directory", [False, True])
def test_a_child_starts_without_the_modules_of_the_current_directory(
    hostile: Path, monkeypatch, module, uses_current_directory
):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    child = start_module(
        module, "1", uses_current_directory=uses_current_directory, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.wait() == 1, "it was told nothing"
    assert what_ran(hostile) == ""


def test_modules_that_the_user_named_are_found_in_the_current_directory_last(hostile: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert search_path()[-1] != str(hostile) and "" not in search_path()
    path = search_path(uses_current_directory=True)
    assert path[-1] == str(hostile) or path[-2:] == [str(hostile), children.PACKAGE_ROOT]


def test_the_directory_that_python_put_first_for_a_module_is_left_out_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", object(), raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/one"])
    assert str(tmp_path) not in search_path()
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/one", str(tmp_path)])
    assert str(tmp_path) in search_path(), "the user asked for it, too"


def test_a_script_that_is_run_by_its_file_keeps_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/one"])
    assert search_path()[0] == str(tmp_path)


def test_a_child_gets_its_arguments_and_gives_its_exit_code(tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n    return 7\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    child = start_module("told", "a b", "", stdout=subprocess.PIPE)
    out, _ = child.communicate()
    assert (out, child.returncode) == (b"['a b', '']\n", 7)


DYING = """
import os, signal
from quire.structured_output.compile import worker
def main():
    if os.path.exists({marker!r}):
        return worker.main()
    open({marker!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
ALWAYS = "def main():\n    return 3\n"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> CompilePool:
    (tmp_path / "other_worker.py").write_text(request.param.format(marker=str(tmp_path / "marker")))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(worker_process, "WORKER", "other_worker")
    return CompilePool(WorkerSetup(LEAF, 3072, 2, 2.0, 400 << 20))


@pytest.mark.parametrize("worker", [DYING], indirect=True, ids=["once"])
def test_a_worker_that_was_killed_is_replaced_and_the_grammar_made(worker: CompilePool):
    try:
        assert worker.compile(PLAIN).result()
    finally:
        worker.close()


@pytest.mark.parametrize("worker", [ALWAYS], indirect=True, ids=["always"])
def test_the_death_of_a_worker_is_not_called_a_limit(worker: CompilePool):
    try:
        error = worker.compile(PLAIN).exception()
    finally:
        worker.close()
    assert "exited with code 3" in str(error) and "MiB" not in str(error)


@pytest.mark.parametrize(
    ("code", "grown_mib", "expected"),
    [
        (-27, 1, OVER_TIME),
        (EXIT_OVER_MEMORY, 1, OVER_MEMORY),
        (-6, 150, OVER_MEMORY),
        (-9, 150, OVER_MEMORY),
        (-9, 10, "was terminated by SIGKILL"),
        (127, 150, OVER_MEMORY),
        (127, 10, "exited with code 127"),
        (-11, 10, "the compiler crashed on it (it was terminated by SIGSEGV)"),
        (1, 150, "exited with code 1"),
    ],
)
def test_a_compilation_that_ended_says_how(code, grown_mib, expected):
    result = result_of_death(code, grown_mib << 20, 200 << 20)
    assert expected in (result.error, result.died)


def test_an_exit_is_described_by_its_signal_or_code():
    assert describe_exit(-9) == "was terminated by SIGKILL"
    assert describe_exit(-99) == "was terminated by signal 99"
    assert describe_exit(3) == "exited with code 3"
