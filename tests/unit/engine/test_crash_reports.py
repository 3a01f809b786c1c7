"""What is written when an engine core dies: what is in it, what is not, and how much is kept."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main as cli
from quire.config.build import build_config
from quire.core.stats import SchedulerStats
from quire.engine.crash_reports import NUM_KEPT, CoreRemains, oom_count, write_crash_report
from quire.utils.last_words import ASK, MAX_BYTES, LastWords, keep_last_words
from quire.utils.report_file import oom_lines, reports_in
from tests.unit.scheduler.harness import make_request

SECRET = "hunter2-hunter2"


def remains(tmp_path: Path, **settings: Any) -> CoreRemains:
    config = build_config(model="leaf", crash_reports=str(tmp_path / "reports"), **settings)
    return CoreRemains(config, 4711, 12.5, {"weights": 5}, "the last line\n")


def parts_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for one in archive.getmembers():
            content = archive.extractfile(one)
            assert content is not None
            found[one.name.split("/", 1)[1]] = content.read().decode()
    return found


def test_a_report_has_settings_versions_log_and_requests_without_secrets_and_tokens(tmp_path: Path):
    transfer = json.dumps(
        {"kv_connector": "X", "kv_role": "kv_both", "kv_connector_extra_config": {"password": SECRET}}
    )
    request = make_request(7, 900)
    path = write_crash_report(
        remains(tmp_path, kv_transfer_config=transfer), "killed by signal 9", [(request, 2)], SchedulerStats(step=3)
    )
    assert path is not None and path.stat().st_mode & 0o077 == 0
    parts = parts_of(path)
    report, machine = json.loads(parts["report.json"]), json.loads(parts["machine.json"])
    assert report["reason"] == "killed by signal 9" and report["last_step"]["step"] == 3
    assert report["memory_parts"] == {"weights": 5} and not report["killed_for_memory"]
    assert machine["packages"]["numpy"] and machine["memory_total_bytes"] > 0 and machine["num_cpus"] > 0
    assert json.loads(parts["config.json"])["model"] == "leaf" and parts["core.log"] == "the last line\n"
    (shown,) = json.loads(parts["requests.json"])
    assert (shown["handle"], shown["prompt_tokens"], shown["cores_lost_with_it"]) == (7, 900, 2)
    assert not any("token_ids" in name for name in shown)
    assert not any(SECRET in part for part in parts.values())


def test_the_newest_reports_are_kept_and_one_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog):
    paths = [write_crash_report(remains(tmp_path), str(number), [], None) for number in range(NUM_KEPT + 2)]
    assert reports_in(tmp_path / "reports") == paths[2:]
    (tmp_path / "file").write_text("")
    elsewhere = build_config(model="leaf", crash_reports=str(tmp_path / "file" / "reports"))
    assert write_crash_report(CoreRemains(elsewhere, 1, 0.0, {}, ""), "", [], None) is None
    assert "no report of the crash can be written" in caplog.text
    off = build_config(model="leaf", crash_reports="none")
    assert write_crash_report(CoreRemains(off, 1, 0.0, {}, ""), "", [], None) is None


def test_the_kernel_s_log_says_who_was_killed_for_memory(tmp_path: Path):
    log = (
        "3,1,5,-;Out of memory: Killed process 12 (python) total-vm:1kB\n6,2,6,-;usb 1-1: new device\n"
        "3,3,7,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB\n"
    )
    lines = oom_lines(4711, log)
    assert len(lines) == 2 and "Killed process 4711" in lines[0] and not oom_lines(4711, "nothing of the kind")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_count(tmp_path) in (0, 2), "as this process's group lies below it"


CHILD = """
import faulthandler, logging, os, sys, threading
from quire.logger import configure_logging, get_logger
from quire.utils.last_words import keep_last_words
configure_logging("info")
keep_last_words(sys.argv[1])
get_logger("quire.test").info("a line of the log")
def wait_in_a_thread(): threading.Event().wait()
threading.Thread(target=wait_in_a_thread, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGSEGV, ASK])
def test_log_and_stacks_of_a_process_are_read_after_its_end(tmp_path: Path, number: signal.Signals):
    path = tmp_path / "log"
    words, command = LastWords(path), [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        path.unlink()
        child.send_signal(number)
        while child.poll() is None and (number != ASK or "wait_in_a_thread" not in words.read()):
            time.sleep(0.002)
        child.kill()
    text = words.read()
    assert "a line of the log" in text and "wait_in_a_thread" in text
    assert ("Segmentation fault" in text) == (number == signal.SIGSEGV)
    words.close()
    assert words.read() == "" and words.num_bytes == 0


def test_of_a_long_log_the_newer_half_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("faulthandler.enable", lambda *_, **__: None)
    monkeypatch.setattr("faulthandler.register", lambda *_, **__: None)
    words, logger = LastWords(tmp_path / "log"), logging.getLogger("quire")
    before = list(logger.handlers), logger.level
    logger.handlers = []  # lines are written in the form of the first handler
    try:
        keep_last_words(tmp_path / "log")
        logger.setLevel(logging.INFO)
        for number in range(3000):
            logger.info("%d %s", number, 100 * "x")
        text = words.read()
    finally:
        os.close(logger.handlers[-1]._fd)  # type: ignore[attr-defined]
        logger.handlers, logger.level = before
    assert text.rstrip().rpartition("\n")[2].startswith("2999 ") and MAX_BYTES < len(text) <= 2 * MAX_BYTES + 200
    assert text[:4].strip().isdigit(), "it begins with a line"
    words.close()


def test_the_command_writes_one_archive_with_the_crashes(tmp_path: Path, capsys):
    crash = write_crash_report(remains(tmp_path), "killed", [], None)
    assert crash is not None
    out, reports = tmp_path / "out.tar.gz", str(tmp_path / "reports")
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "run-000001.qfr").write_bytes(b"recording")
    command = ["report", "--output", str(out), "--crash-reports", reports, "--url", "http://127.0.0.1:9"]
    assert cli.main(command) == 0 and str(out) in capsys.readouterr().out
    with tarfile.open(out) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"machine.json", f"crashes/{crash.name}", "state.json.error"} <= names
    assert cli.main(["report", "--list", "--crash-reports", reports]) == 0 and crash.name in capsys.readouterr().out
    assert cli.main(["report", "--output", str(out), "--flight-recorder", str(tmp_path)]) == 2
