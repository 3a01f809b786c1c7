"""`make sanitize`: the native kernels under AddressSanitizer and UBSan, the thread pool under ThreadSanitizer.

Builds into build/sanitize and leaves the installed module alone. Runs tests/kernels/native on every tier of this
machine; more arguments go to pytest. The last line counts tests and reports; the reports lie in build/sanitize/reports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"
REPORTS = BUILD / "reports"
REPORT_LINE = re.compile(r"ERROR: AddressSanitizer|runtime error:|WARNING: ThreadSanitizer")
POOL_SOURCES = ("tests/pool_stress.cpp", "pool.cpp", "probe.cpp", "memory.cpp", "checksum.cpp")


def build() -> Path:
    """The extension module with sanitizers; builds what changed."""
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    )
    subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DQUIRE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug",
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_ROOT={nanobind.stdout.strip()}", "--log-level=WARNING"],
        check=True,
    )  # fmt: skip
    subprocess.run(["nice", "cmake", "--build", str(BUILD), "-j1"], check=True)
    return next(BUILD.glob("_quire_native*.so"))


def runtime_libraries() -> str:
    """What must be loaded before Python for its child to be an instrumented module; libstdc++ for its exceptions."""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        found.append(str(Path(path.stdout.strip()).resolve()))
    return ":".join(found)


def test_kernels(module: Path, arguments: list[str]) -> tuple[int, bool]:
    """(tests that passed, whether all did) with the sanitized module."""
    log = f"log_path={REPORTS}/report"
    environment = {
        **os.environ,
        "QUIRE_NATIVE_LIBRARY": str(module),
        "LD_PRELOAD": runtime_libraries(),
        # Leaks: Python's own at exit are thousands. Null: torch turns it into an error, as without a sanitizer.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:{log}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
        "OMP_NUM_THREADS": "1",
    }
    # UBSan writes to the error stream and ends the process, so pytest must not keep what is written.
    command = [sys.executable, "-m", "pytest", "--capture=no", *(arguments or ["tests/kernels/native"])]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    num_passed = 0
    with (REPORTS / "output").open("w") as output:
        for line in process.stdout:
            print(line, end="", flush=True)
            output.write(line)
            if found := re.search(r"(\d+) passed", line):
                num_passed = int(found[1])
    return num_passed, process.wait() == 0


def test_pool() -> tuple[int, bool]:
    """(1, whether the pool's stress program ran well) under ThreadSanitizer."""
    program = BUILD / "pool_stress"
    sources = [str(ROOT / "csrc" / name) for name in POOL_SOURCES]
    subprocess.run(
        ["nice", "c++", "-std=c++17", "-O1", "-g1", "-fsanitize=thread", f"-I{ROOT / 'csrc/include'}", *sources, "-o",
         str(program), "-pthread"],
        check=True,
    )  # fmt: skip
    environment = {**os.environ, "TSAN_OPTIONS": f"log_path={REPORTS}/report"}
    return 1, subprocess.run([str(program)], env=environment, check=False).returncode == 0


def main() -> int:
    """Exit code 0 when every test passed without a report."""
    module = build()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    results = [test_kernels(module, sys.argv[1:]), test_pool()]
    num_reports = sum(len(REPORT_LINE.findall(path.read_text(errors="replace"))) for path in REPORTS.iterdir())
    is_good = num_reports == 0 and all(is_good for _, is_good in results)
    outcome = "ok" if is_good else "FAILED"
    print(f"sanitize: {outcome}, {sum(passed for passed, _ in results)} tests, {num_reports} reports")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
