"""The thread pool under contention: every task runs exactly once, whoever calls, sleeps, forks or ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import ConfigError, NativeLibraryError
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.guards import randn

ROOT = Path(__file__).parents[3]


def pool_of(num_threads: int, spin_us: int = 2000) -> NativeRuntime:
    return NativeRuntime("portable", num_threads=num_threads, spin_us=spin_us)


def probe(runtime: NativeRuntime, runs: int, tasks: int, task_ns: int = 0, pause_us: int = 0) -> tuple[int, ...]:
    return tuple(runtime.library.probe_pool(runtime.pool, runs, tasks, task_ns, pause_us))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("num_tasks", [1, 2, 3, 17, 100])
def test_thousands_of_tiny_jobs_run_each_task_once(num_threads: int, num_tasks: int):
    assert probe(pool_of(num_threads), runs=2000, tasks=num_tasks)[0] == 0


@pytest.mark.parametrize("spin_us", [0, 20], ids=["asleep at once", "asleep soon"])
def test_workers_that_fall_asleep_at_any_moment_miss_nothing(spin_us: int):
    runtime = pool_of(4, spin_us)
    for pause_us in (0, 1, spin_us):
        assert probe(runtime, runs=700, tasks=9, task_ns=500, pause_us=pause_us)[0] == 0


def test_callers_of_several_threads_take_turns():
    runtime, wrong = pool_of(3, spin_us=50), []
    callers = [
        threading.Thread(target=lambda tasks=tasks: wrong.append(probe(runtime, runs=500, tasks=tasks)[0]))
        for tasks in (1, 2, 5, 8, 13)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [0] * 5


def test_workers_take_their_share():
    runtime = pool_of(2)
    # On a machine with other work the second thread may not run for as long as all of a try takes.
    shares = (probe(runtime, runs=20, tasks=40, task_ns=50_000)[3] for _ in range(50))
    assert any(by_others > 20 * 40 * 0.1 for by_others in shares)


def wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def cpu_share(seconds: float) -> float:
    before, started = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - before) / (time.perf_counter() - started)


def test_an_idle_pool_takes_no_cpu_time():
    runtime = pool_of(4, spin_us=1000)
    probe(runtime, runs=3, tasks=8)
    assert wait_until(lambda: cpu_share(0.1) < 0.02)
    assert probe(runtime, runs=3, tasks=8)[0] == 0


def test_a_pool_ends_while_its_workers_spin_sleep_or_have_never_run():
    for spin_us, pause_s in ((1_000_000, 0), (0, 0.002), (0, 0)):
        for runs in (0, 1):
            runtime = pool_of(4, spin_us)
            probe(runtime, runs=runs, tasks=8)
            time.sleep(pause_s)
            del runtime


def num_workers() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return names.count("quire-compute")


def test_no_thread_stays_behind():
    before = num_workers()
    runtime = pool_of(5)
    assert num_workers() == before + 4
    del runtime
    assert num_workers() == before


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` is true in a forked child that then ends as a child of multiprocessing does."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_computes_alone_and_can_drop_the_pool():
    runtime = pool_of(3, spin_us=100_000)
    probe(runtime, runs=10, tasks=10)
    x, weight = randn(8, 32), randn(32)

    def work() -> bool:
        nonlocal runtime
        from quire.kernels.native.elementwise import rms_norm

        is_right = probe(runtime, runs=10, tasks=10)[0] == 0 and runtime.pool.num_threads == 1
        is_right = is_right and bool(rms_norm(runtime, x, weight, 1e-6).isfinite().all())
        del runtime
        return is_right and probe(pool_of(3), runs=10, tasks=10)[0] == 0

    assert in_child(work)
    assert runtime.pool.num_threads == 3 and probe(runtime, runs=10, tasks=10)[0] == 0


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_computes_leaves_no_lock_behind():
    runtime = pool_of(2)
    caller = threading.Thread(target=lambda: probe(runtime, runs=20_000, tasks=4, task_ns=1000))
    caller.start()
    results = [in_child(lambda: probe(runtime, runs=10, tasks=4)[0] == 0) for _ in range(10)]
    caller.join()
    assert all(results)


def signals_blocked_by_workers() -> list[int]:
    masks = []
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == "quire-compute":
            masks.append(int(status["SigBlk"], 16))
    return masks


def test_compute_threads_leave_signals_to_python_and_take_their_own_crashes():
    runtime = pool_of(3)
    probe(runtime, runs=1, tasks=3)

    def are_right() -> bool:  # a thread that starts or ends blocks all of them for a moment
        masks = signals_blocked_by_workers()
        return len(masks) >= 2 and all(
            mask >> (signal.SIGINT - 1) & 1
            and mask >> (signal.SIGTERM - 1) & 1
            and not mask >> (signal.SIGSEGV - 1) & 1
            for mask in masks
        )

    assert wait_until(are_right)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_are_bound_where_they_are_told(caplog):
    cpu = max(os.sched_getaffinity(0))
    runtime = NativeRuntime("portable", num_threads=2, cpus=[cpu, cpu])
    assert runtime.pool.num_unbound == 0 and probe(runtime, runs=10, tasks=10)[0] == 0
    with caplog.at_level(logging.WARNING, "quire"):
        runtime = NativeRuntime("portable", num_threads=3, cpus=[0, cpu, 60_000])
    assert runtime.pool.num_unbound == 1 and "1 of 3 compute threads could not be pinned" in caplog.text
    assert probe(runtime, runs=10, tasks=10)[0] == 0


@pytest.mark.parametrize(
    ("num_threads", "cpus", "spin_us"),
    [(0, [], 0), (-1, [], 0), (5000, [], 0), (1 << 40, [], 0), (2, [0], 0), (1, [-1], 0), (1, [1 << 40], 0),
     (2, [], -1), (2, [], 1 << 62)],
)  # fmt: skip
def test_numbers_that_make_no_pool_are_refused(num_threads: int, cpus: list[int], spin_us: int):
    with pytest.raises(ConfigError):
        NativeRuntime("portable", num_threads=num_threads, cpus=cpus, spin_us=spin_us)


def test_a_system_without_threads_to_give_is_an_error_that_leaves_none_behind():
    code = (
        "import resource, threading, os\n"
        "from quire.errors import NativeLibraryError\n"
        "from quire.kernels.native.runtime import NativeRuntime\n"
        "os.setresuid(54321, 54321, 54321) if os.geteuid() == 0 else None\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "try:\n"
        "    NativeRuntime('portable', num_threads=50)\n"
        "except NativeLibraryError as error:\n"
        "    assert 'smaller num_threads' in error.hint\n"
        "    raise SystemExit(len(os.listdir('/proc/self/task')) - before)\n"
        "raise SystemExit('no error')\n"
    )
    # numpy's own threads end when the kernels' self-test forks, and would be counted before it alone.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert issubclass(NativeLibraryError, RuntimeError)


def test_tasks_round_to_nearest_whatever_the_mode_of_their_caller():
    code = (
        "import ctypes, torch\n"
        "from quire.kernels.native.elementwise import rms_norm\n"
        "from quire.kernels.native.runtime import NativeRuntime\n"
        "runtime = NativeRuntime('portable')\n"
        "x, w = torch.randn(64, 33), torch.randn(33)\n"
        "expected = rms_norm(runtime, x, w, 1e-6)\n"
        "libm = ctypes.CDLL('libm.so.6')\n"
        "assert libm.fesetround(0x800) == 0\n"  # upwards
        "actual = rms_norm(runtime, x, w, 1e-6)\n"
        "assert libm.fegetround() == 0x800 and libm.fesetround(0) == 0\n"
        "assert torch.equal(actual, expected)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
