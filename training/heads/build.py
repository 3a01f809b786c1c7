"""Makes the speculation heads of a model: `python -m training.heads.build` (`make leaf-heads`).

Answers of the model, then the three trainings, as many at a time as there are cores, then export and measurement, each
in a process of its own. What is done is skipped and what was cut off goes on; delete the build folder to begin again,
as after a change of the model.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.build import step
from training.export import digest
from training.heads.train import TRAINERS


def check_target(out: Path, target: Path) -> None:
    """Notes the target's digest in the build folder.

    Raises:
        SystemExit: What lies there was made from another model.
    """
    note, now = out / "target", digest(target / "model.safetensors")
    if note.exists() and note.read_text() != now:
        raise SystemExit(f"{out} has answers of another model than {target}: delete it, then start again")
    out.mkdir(parents=True, exist_ok=True)
    note.write_text(now)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf-heads"))
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"), help="gets the heads beside it")
    parser.add_argument("--samples", type=int, default=16000, help="conversations to learn from")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="heads that are trained at the same time")
    args = parser.parse_args()
    check_target(args.out, args.target)
    folders = ("--out", str(args.out), "--target", str(args.target))
    step("heads.distill", *folders, "--samples", str(args.samples))
    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(lambda kind: step("heads.train", kind, *folders), TRAINERS):
            pass
    step("heads.export", *folders)


if __name__ == "__main__":
    main()
