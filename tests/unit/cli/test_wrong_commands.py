"""Wrong command lines are answered by one error and one hint, before anything heavy is imported or started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.each import each
from tests.unit.cli.wrong_commands import WRONG, make_files

ROOT = Path(__file__).parents[3]
# Runs many command lines in one process: each one's exit status, output, CPU seconds, and what it imported or started.
RUNNER = """
import contextlib, io, json, os, signal, sys, time
from quire.cli.main import main

def give_up(*_):
    raise RuntimeError("it is not wrong, or hangs")

signal.signal(signal.SIGALRM, give_up)
results = []
for argv in json.load(sys.stdin):
    out, start = io.StringIO(), time.process_time() + sum(os.times()[2:4])
    sys.argv[1:] = argv
    signal.alarm(60)
    try:
        with contextlib.redirect_stderr(out):
            status = main(argv)
    except BaseException as error:
        status = repr(error)
    signal.alarm(0)
    seconds = time.process_time() + sum(os.times()[2:4]) - start
    heavy = [name for name in ("torch", "fastapi", "quire.engine.core_proc") if name in sys.modules]
    results.append([status, out.getvalue(), seconds, heavy])
print("RESULTS" + json.dumps(results))
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "VLLM_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", **more}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str, float, list[str]]]:
    files = make_files(tmp_path_factory.mktemp("wrong"))
    lines = [
        [word.format_map({**files, "": "{}"}) if "{}" not in word else word for word in line.split()] for line in WRONG
    ]
    for words in lines:
        if words[0] == "serve" and not {"--port", "--host", "--uds"} & {*words}:
            words[1:1] = ["--port", "0"]  # something else may listen on 8000
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], cwd=ROOT, env=environment(), input=json.dumps(lines), capture_output=True,
        text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(done.stdout.rpartition("RESULTS")[2])
    return {line: tuple(one) for line, one in zip(WRONG, found, strict=True)}


def test_there_are_150_of_them() -> None:
    assert len(WRONG) >= 150


@each("line", WRONG)
def test_a_wrong_command_line_has_one_error_and_one_hint(
    results: dict[str, tuple[object, str, float, list[str]]], line: str
) -> None:
    status, text, seconds, heavy = results[line]
    error, hint = WRONG[line]
    assert status in (1, 2), text
    assert "Traceback" not in text
    assert text.count("error: ") == 1 and text.count("\nhint: ") == 1, text
    before, _, after = text.partition("\nhint: ")
    assert error in before and hint in after, text
    assert seconds < 20.0, "of CPU time; it takes well under one"
    assert not heavy, f"{heavy} was imported for it"


@pytest.mark.parametrize("argv", [["serve", "--prot", "1"], ["generate", "--model", "/nowhere/at all", "hi"]])
def test_so_has_one_in_a_process_of_its_own(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", *argv], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("hint: ") == 1 and "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_an_engine_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "quire", "serve", "leaf", "--port", port], cwd=ROOT, env=environment(),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1:{port}: address already in use",
        "hint: stop the program that listens there, or choose another --port or --host",
    ]


def test_a_wrong_level_of_the_log_is_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "leaf"], cwd=ROOT, env=environment(QUIRE_LOG_LEVEL="debg"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[1] == "hint: did you mean DEBUG?"


def test_input_and_output_in_another_encoding_end_without_a_traceback() -> None:
    def run(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment(PYTHONIOENCODING="ascii"), capture_output=True,
            check=False, **options,
        )  # fmt: skip

    base = (
        "import sys, types\nfrom quire.cli import main as cli\n"
        "module = types.ModuleType('fake', 'A fake.')\n"
        "module.add_arguments = lambda parser: None\n"
        "sys.modules['fake'] = module\ncli.COMMANDS['fake'] = ('fake', '')\n"
    )
    shown = run(base + "module.run = lambda args: print('caf\\u00e9') or 0\nraise SystemExit(cli.main(['fake']))")
    assert (shown.returncode, shown.stdout.strip(), shown.stderr) == (0, b"caf?", b"")
    read = run(
        base + "module.run = lambda args: print(sys.stdin.read()) or 0\nraise SystemExit(cli.main(['fake']))",
        input="café".encode(),
    )
    assert read.returncode == 2 and read.stderr.startswith(b"error: the input is not ascii: byte 0xc3\nhint: ")
