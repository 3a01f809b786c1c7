"""`make test-ucm`: engines over UCM as it is, with its Posix store: save, evict, load, damage, killed processes.

UCM runs in a Python 3.12 of its own (`--side-python`), without vLLM and torch. Every answer is compared with that of an
engine without a connector, byte by byte, log-probabilities too. The last line says how many were wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from quire.kv_transfer.ucm import link
from tests.robustness.connector_answers import (
    BLOCK_SIZE,
    NUM_SHARED,
    NUM_TOKENS,
    Check,
    Engine,
    missing,
    random_prompts,
)

SHOW_VERSION = "from importlib.metadata import version; print(version('uc-manager-cuda-cu129'))"


def side_processes() -> list[int]:
    """Numbers of the processes that this one started for UCM."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if str(link.PROGRAM) in line]


def damage(root: Path, rng: random.Random) -> int:
    """Change, cut or remove a third of the blocks. Returns how many."""
    files = [path for path in sorted(root.glob("*/*")) if path.stat().st_size > 1 and rng.random() < 1 / 3]
    for path in files:
        data = bytearray(path.read_bytes())
        kind = rng.choice(["bit", "cut", "gone"])
        if kind == "gone":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            data[rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    return len(files)


def run(side_python: str, num_prompts: int, seed: int, log: str | None) -> int:
    """Number of answers that were wrong or lost, and of things that should have been counted."""
    rng = random.Random(seed)
    check = Check(random_prompts(num_prompts, rng))
    problems = num_faults = num_killed = 0
    least = num_prompts * ((NUM_TOKENS - NUM_SHARED) // BLOCK_SIZE)  # siblings share what one of them has loaded
    with tempfile.TemporaryDirectory() as directory:
        store = {
            "store_pipeline": "Posix", "storage_backends": directory, "posix_data_trans_concurrency": 2,
            "posix_lookup_concurrency": 2,
        }  # fmt: skip
        extra = {
            "ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}],
            "side_python": side_python, "side_log": log,
        }  # fmt: skip
        transfer = {"kv_connector": "UCMConnector", "kv_connector_extra_config": extra}
        first = Engine(transfer)
        check.ask(first, "saved")
        check.ask(first, "evicted from the engine, loaded")
        problems += missing(first, "loaded_blocks", least)
        first.core.shutdown()
        second = Engine(transfer)
        check.ask(second, "loaded by another engine")
        problems += missing(second, "loaded_blocks", least)
        for after in (1, 4):

            def kill() -> None:
                nonlocal num_killed
                for number in side_processes():
                    os.kill(number, signal.SIGKILL)
                    num_killed += 1

            check.ask(second, f"its processes killed after {after} steps", after=after, act=kill)
            time.sleep(link.RESTART_S)
            before = second.counts["loaded_blocks"]
            check.ask(second, "asked again")
            problems += missing(second, "loaded_blocks", int(before) + least)
        for _ in range(3):
            num_faults += damage(Path(directory), rng)
            check.ask(second, f"{num_faults} files damaged")
        problems += missing(second, "failed_blocks", 1)
        second.core.shutdown()
    version = subprocess.run([side_python, "-P", "-c", SHOW_VERSION], capture_output=True, text=True).stdout.strip()
    num_loaded = first.counts["loaded_blocks"] + second.counts["loaded_blocks"]
    print(
        f"UCM {version} UCMConnector over its Posix store: {check.num_asked} answers, {num_loaded:g} blocks loaded, "
        f"{num_faults} files damaged, {num_killed} processes killed; wrong {check.num_wrong}, lost {check.num_lost}, "
        f"not counted {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side-python", required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log")
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.side_python, args.prompts, args.seed, args.log)))


if __name__ == "__main__":
    main()
