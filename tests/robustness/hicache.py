"""`make test-hicache`: engines over SGLang's own storage back-end of HiCache, as it is: save, evict, load, and damage.

Run by a Python that has `sglang`, without its CUDA packages: `HiCacheFile` needs none. Every answer is compared with
that of an engine without a connector, byte by byte, log-probabilities too. The last line says how many were wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import shutil
import tempfile
from pathlib import Path

from tests.robustness.connector_answers import (
    BLOCK_SIZE,
    NUM_SHARED,
    NUM_TOKENS,
    Check,
    Engine,
    missing,
    random_prompts,
)

MODULE, CLASS = "sglang.srt.mem_cache.hicache_storage", "HiCacheFile"


def damage(root: Path, rng: random.Random) -> dict[str, int]:
    """Do something to half of the files, a different thing to each. Returns how many had each."""
    kinds: dict[str, int] = {}
    for path in sorted(root.glob("*.bin")):
        kind = rng.choice(["bit", "cut", "emptied", "gone", "swapped", "", "", "", "", ""])
        data = bytearray(path.read_bytes())
        if kind == "bit":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        elif kind == "emptied":
            path.write_bytes(b"")
        elif kind == "gone":
            path.unlink()
        elif kind == "swapped":
            path.write_bytes(rng.choice(sorted(root.glob("*.bin"))).read_bytes())
        kinds[kind or "whole"] = kinds.get(kind or "whole", 0) + 1
    return kinds


def run(num_prompts: int, seed: int) -> int:
    """Number of answers that were wrong or lost, and of things that should have been counted."""
    rng = random.Random(seed)
    check = Check(random_prompts(num_prompts, rng))
    problems = num_faults = 0
    whole = num_prompts * ((NUM_TOKENS - NUM_SHARED) // BLOCK_SIZE)  # siblings share what one of them has loaded
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        extra = {
            "storage_module_path": MODULE, "storage_class": CLASS, "model_name": "leaf",
            "storage_extra_config": {"file_storage_path": directory},
        }  # fmt: skip
        transfer = {"kv_connector": "HiCacheConnector", "kv_connector_extra_config": extra}
        first = Engine(transfer)
        check.ask(first, "saved")
        check.ask(first, "evicted from the engine, loaded")
        problems += missing(first, "loaded_blocks", whole)
        first.core.shutdown()
        second = Engine(transfer)
        check.ask(second, "loaded by another engine")
        problems += missing(second, "loaded_blocks", whole)
        backup = root.parent / f"{root.name}.whole"
        shutil.copytree(root, backup)
        for _ in range(5):
            kinds = damage(root, rng)
            num_faults += sum(number for kind, number in kinds.items() if kind != "whole")
            check.ask(second, f"damaged {kinds}")
            for path in backup.iterdir():
                shutil.copy(path, root / path.name)
        shutil.rmtree(backup)
        problems += missing(second, "failed_blocks", 1)
        second.core.shutdown()
    num_loaded = first.counts["loaded_blocks"] + second.counts["loaded_blocks"]
    print(
        f"SGLang {importlib.metadata.version('sglang')} {CLASS}: {check.num_asked} answers, "
        f"{num_loaded:g} blocks loaded, {num_faults} files damaged; "
        f"wrong {check.num_wrong}, lost {check.num_lost}, not counted {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.prompts, args.seed)))


if __name__ == "__main__":
    main()
