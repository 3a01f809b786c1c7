"""Runs a load in this process or, split, in several of its own, each of which calls `main`.

A child reads a `Load` as a line of JSON, says that it is ready, reads when to start, and writes a `LoadReport`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from quire.bench.client_watch import worst_of
from quire.bench.load import Progress, run_load, run_on_loop
from quire.bench.records import Load, LoadReport
from quire.errors import QuireServerError
from quire.utils.children import Child, start_module

READY = b"ready\n"
START_DELAY_S = 0.2
ENDING_S = 60.0


def run_in_processes(load: Load, num_processes: int, on_end: Progress | None = None) -> LoadReport:
    """Run `load`, its requests dealt out in turn to `num_processes`.

    Args:
        on_end: called with each record while it runs; with several processes, when all have ended.

    Raises:
        QuireServerError: a client process failed.
    """
    if num_processes == 1:
        return run_on_loop(run_load(load, on_end))
    report = merged(_run_children(split(load, num_processes)))
    for record in report.records if on_end is not None else ():
        on_end(record)  # type: ignore[misc]
    return report


def split(load: Load, num_processes: int) -> list[Load]:
    """A share of the load for each process: every so-manyth request, and its part of the concurrency."""
    shares = []
    for number in range(num_processes):
        concurrency = load.max_concurrency
        if concurrency is not None:
            concurrency = concurrency // num_processes + (number < concurrency % num_processes)
        jobs = load.jobs[number::num_processes]
        shares.append(msgspec.structs.replace(load, jobs=jobs, max_concurrency=concurrency))
    return shares


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of several."""
    records = sorted((record for report in reports for record in report.records), key=lambda record: record.index)
    return LoadReport(
        min(report.start_s for report in reports), records, worst_of([report.health for report in reports])
    )


def _run_children(loads: Sequence[Load]) -> list[LoadReport]:
    children: list[Child] = []
    try:
        children.extend(start_module(__name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in loads)
        for child, load in zip(children, loads, strict=True):
            _tell(child, msgspec.json.encode(load))
        for child in children:
            if _heard(child) != READY:
                raise _failed(child)
        start_s = str(time.monotonic() + START_DELAY_S).encode()
        for child in children:
            _tell(child, start_s)
        return [_report_of(child) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.__exit__(None, None, None)


def _tell(child: Child, line: bytes) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; what it does not answer tells
        child.stdin.write(line + b"\n")
        child.stdin.flush()


def _heard(child: Child) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


def _report_of(child: Child) -> LoadReport:
    try:
        return msgspec.json.decode(_heard(child), type=LoadReport)
    except msgspec.DecodeError:
        raise _failed(child) from None


def _failed(child: Child) -> QuireServerError:
    status = child.wait(ENDING_S)
    return QuireServerError(f"a client process ended with status {status}", hint="its own message is above")


def main() -> int:
    """One client process."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    load = msgspec.json.decode(stdin.readline(), type=Load)
    stdout.write(READY)
    stdout.flush()
    load = msgspec.structs.replace(load, start_s=float(stdin.readline()))
    stdout.write(msgspec.json.encode(run_on_loop(run_load(load))) + b"\n")
    return 0
