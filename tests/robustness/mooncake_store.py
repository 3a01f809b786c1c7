"""The second half of `make test-mooncake`: engines over Mooncake's store, whose master is killed.

Run by a Python that has Mooncake. Every answer is compared with that of an engine without a connector, tokens and
log-probabilities byte by byte. The last line says how many were wrong or lost.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.robustness.lmcache import NUM_TOKENS, Check, Engine
from tests.robustness.router import free_port

BLOCK_SIZE, START_S = 16, 3.0
MIB = 1 << 20


def start_master() -> tuple[subprocess.Popen[bytes], str]:
    """A master on free ports, and its address."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.origin is not None, "the program is run by a Python that has Mooncake"
    port = free_port()
    command = [
        str(Path(found.origin).with_name("mooncake_master")), "--rpc_address=127.0.0.1", f"--rpc_port={port}",
        f"--metrics_port={free_port()}", "--enable_metric_reporting=false",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(START_S)
    return process, f"127.0.0.1:{port}"


def run(num_prompts: int, seed: int) -> int:
    """Number of answers that were wrong or lost, and of blocks that should have been loaded and were not."""
    rng = random.Random(seed)
    check = Check([[rng.randrange(5, 900) for _ in range(NUM_TOKENS)] for _ in range(num_prompts)])
    master, address = start_master()
    try:
        extra = {
            "master_server_address": address, "global_segment_size": 64 * MIB, "local_buffer_size": 32 * MIB,
        }  # fmt: skip
        transfer: dict[str, Any] = {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": extra}
        first, second = Engine(transfer), Engine(transfer)
        check.ask(first, "saved")
        check.ask(second, "loaded by a second engine")
        check.ask(second, "loaded again")
        problems = int(second.counts["loaded_blocks"] < 2 * num_prompts * (NUM_TOKENS // BLOCK_SIZE))
        check.ask(second, "the master is killed after 2 steps", after=2, act=master.kill)
        for engine in (first, second):
            check.ask(engine, "without a master")
        version = importlib.metadata.version("mooncake-transfer-engine-non-cuda")
        print(
            f"Mooncake's store {version}: {check.num_asked} answers, {second.counts['loaded_blocks']:g} blocks loaded, "
            f"a master killed; wrong {check.num_wrong}, lost {check.num_lost}, not loaded {problems}",
            flush=True,
        )
        return check.num_wrong + check.num_lost + problems
    finally:
        master.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.prompts, args.seed)))


if __name__ == "__main__":
    main()
