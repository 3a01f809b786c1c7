"""What `make` says on a machine that lacks something."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path):
    for name in ("sh", "id"):  # neither c++ nor apt-get
        tool = shutil.which(name)
        assert tool is not None
        (tmp_path / name).symlink_to(tool)
    command = [str(shutil.which("make")), "--no-print-directory", "compiler"]
    result = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "no C++ compiler for the native kernels: apt-get install g++, then make again" in result.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_alone_lists_every_target_that_a_person_calls():
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = {target for line in listed for target in line[2:27].split()}
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY")]
    callable_targets = {target for line in lines for target in line.split()[1:]} - {"compiler"}
    assert callable_targets <= named
    assert all(line[27:].strip() for line in listed)
