"""`make fuzz-kernels`: random calls of the typed wrappers for a while, in children whose crash names its seed.

Every batch runs on another tier. The last line counts calls; the exit code is 1 when any was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BATCH = 5000


def run_batch(tier: str, first: int, count: int, place: Path) -> None:
    """In a child: the seeds first .. first + count - 1; `place` always holds the one that runs."""
    from tests.kernels.native.fuzz import Boundary, run
    from tests.kernels.native.fuzz_blocks import BLOCK_CALLS
    from tests.kernels.native.fuzz_calls import CALLS
    from tests.kernels.native.fuzz_coded import CODED_CALLS
    from tests.kernels.native.fuzz_expert_calls import EXPERT_CALLS

    def seeds() -> Iterator[int]:
        for seed in range(first, first + count):
            os.pwrite(file, b"%20d" % seed, 0)
            yield seed

    file = os.open(place, os.O_RDWR | os.O_CREAT)
    counts = run(Boundary(tier, {**CALLS, **EXPERT_CALLS, **BLOCK_CALLS, **CODED_CALLS}), seeds())
    print(json.dumps([sum(pair[i] for pair in counts.values()) for i in (0, 1)]))


def main() -> int:
    """Exit code 0 when every call was computed right or refused."""
    from quire.kernels.native.library import EMULATED_TIER, supported_tiers

    parser = argparse.ArgumentParser(prog="make fuzz-kernels")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    parser.add_argument("--batch", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.batch:
        tier, first, count, place = arguments.batch
        run_batch(tier, int(first), int(count), Path(place))
        return 0
    tiers = [*supported_tiers(), EMULATED_TIER]
    computed = refused = failures = 0
    deadline, first = time.monotonic() + arguments.seconds, arguments.seed
    print(f"first seed {first}, tiers {', '.join(tiers)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "seed"
        while time.monotonic() < deadline:
            tier = tiers[(first - arguments.seed) // BATCH % len(tiers)]
            batch = [sys.executable, "-m", __spec__.name, "--batch", tier, str(first), str(BATCH), str(place)]
            child = subprocess.run(batch, cwd=ROOT, capture_output=True, text=True, check=False)
            if child.returncode == 0:
                counts = json.loads(child.stdout.splitlines()[-1])
                computed, refused = computed + counts[0], refused + counts[1]
            else:
                failures += 1
                seed = place.read_text().strip() if place.exists() else str(first)
                print(child.stderr[-3000:])
                print(f"tier {tier}, exit code {child.returncode}; again: python -m {__spec__.name} --batch {tier} "
                      f"{seed} 1 /tmp/seed", flush=True)  # fmt: skip
            first += BATCH
    print(f"fuzz-kernels: {computed + refused} calls, {refused} refused, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
