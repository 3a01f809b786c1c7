"""`make test-tiers`: kernel tests and tests that run a model, with every tier of this machine forced in turn.

More arguments replace the tests. One line a tier at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/kernels/native", "tests/models", "tests/e2e")


def run(tier: str, tests: list[str]) -> tuple[bool, str]:
    """(whether all passed, pytest's own last words)."""
    environment = {**os.environ, "QUIRE_KERNEL_TIER": tier, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-v", "--no-header", *tests]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    print(f"tier {tier}", flush=True)
    summary = "no summary"
    for line in process.stdout:
        if re.match(r"FAILED|ERROR|E  ", line):
            print(line, end="", flush=True)
        if found := re.search(r"=+ (.*(?:passed|failed|error).*?) =+$", line.strip()):
            summary = found[1]
    return process.wait() == 0, summary


def main() -> int:
    """Exit code 0 when all tests passed on all tiers."""
    from quire.kernels.native.library import supported_tiers

    os.environ.pop("QUIRE_KERNEL_TIER", None)
    results = [(tier, *run(tier, sys.argv[1:] or list(TESTS))) for tier in supported_tiers()]
    for tier, is_good, summary in results:
        print(f"test-tiers: {tier}: {'ok' if is_good else 'FAILED'}, {summary}")
    return 0 if all(is_good for _, is_good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
