"""Child processes: the one place where any is started.

One that runs this Python looks for modules where this process does, but never in the current directory because Python
put that first by itself: files in the directory where Quire is started are never run. Keeps nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Child = subprocess.Popen[bytes]

# Nothing but `sys`, which is part of the interpreter, is imported before the path is set.
BOOT = """import sys
number = int(sys.argv[2])
sys.path[:] = sys.argv[3:number + 3]
module, sys.argv = sys.argv[1], [sys.argv[1], *sys.argv[number + 3:]]
import importlib
raise SystemExit(importlib.import_module(module).main())"""
PACKAGE_ROOT = str(Path(__file__).parents[2])


def start_module(module: str, *arguments: str, uses_current_directory: bool = False, **options: Any) -> Child:
    """Start a process that calls `main()` of a module of Quire, its arguments in `sys.argv[1:]`.

    Args:
        module: its full name.
        uses_current_directory: modules that the user named may lie there, where this process finds them there, too; it
            is searched last.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    path = search_path(uses_current_directory=uses_current_directory)
    command = [sys.executable, "-c", BOOT, module, str(len(path)), *path, *arguments]
    return subprocess.Popen(command, **options)


def write_block(child: Child, data: bytes) -> None:
    """Send what `child_life.read_block` reads in the child; nothing where it has ended, as its exit code will say."""
    assert child.stdin is not None, "a pipe"
    with contextlib.suppress(OSError):
        child.stdin.write(len(data).to_bytes(8, "little") + data)
        child.stdin.flush()


def start_file(python: str, path: Path, *arguments: str, **options: Any) -> Child:
    """Start a file that imports nothing of Quire in another Python, which looks for modules where its own packages are.

    Args:
        python: the interpreter's path.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.Popen([python, "-P", str(path), *arguments], env=environment, **options)


def search_path(*, uses_current_directory: bool = False) -> list[str]:
    """Where a child looks for modules."""
    current = str(Path.cwd()) if os.path.isdir(".") else ""
    path = [str(entry) for entry in sys.path]
    has_current = not all(map(os.path.isabs, path))
    path = [entry for entry in path if os.path.isabs(entry)]
    if _is_run_by_name() and current in path:
        path.remove(current)  # the first one is Python's own; another was asked for
        has_current = True
    if has_current and uses_current_directory:
        path.append(current)
    if PACKAGE_ROOT not in path:
        path.append(PACKAGE_ROOT)
    return path


def _is_run_by_name() -> bool:
    """Whether this process runs `python -m`, which puts the current directory first."""
    return getattr(sys.modules.get("__main__"), "__spec__", None) is not None


def forked_pool(num_processes: int) -> ProcessPoolExecutor:
    """A pool whose processes are copies of this one, and import nothing to begin with."""
    return ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"))


def wait_for_end(child: Child, timeout_s: float) -> int | None:
    """The return code of a child that ends within a time, None of one that runs on; sleeps meanwhile, without polling.

    `Popen.wait` with a time limit wakes up 20 times a second, where signals cannot be waited for.
    """
    if child.poll() is None:
        try:
            ended = os.pidfd_open(child.pid)
        except (AttributeError, OSError):  # not on this system
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout_s)
            return child.returncode
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(1e3 * timeout_s)
        finally:
            os.close(ended)
    return child.poll()


def describe_exit(code: int) -> str:
    """How a process ended, from its return code: "was terminated by SIGKILL", "exited with code 1"."""
    if code < 0:
        names = {int(one): one.name for one in signal.Signals}
        return f"was terminated by {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"
