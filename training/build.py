"""Makes `leaf` from nothing: `python -m training.build` (`make leaf`).

Runs tokenizer, prepare, train, evaluate and export one after the other, each in its own process. Steps whose products
exist are skipped and a training that was cut off goes on; delete the build folder to start over. The finished model
replaces TARGET only if its scores are no worse than floors.py asks; `make leaf-heads` then makes its heads anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from training.floors import shortfalls


def step(module: str, *arguments: str) -> None:
    """Runs `python -m training.<module>`; raises CalledProcessError if it fails."""
    print(f"== training.{module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"training.{module}", *arguments], check=True)


def accept(built: Path, scores_file: Path, target: Path) -> None:
    """Copies the files of a model to `target` if its scores are good enough.

    Raises:
        SystemExit: They are not; `target` is as it was.
    """
    summary = json.loads(scores_file.read_text())
    missed = shortfalls(summary["count"], summary["scores"])
    if missed:
        raise SystemExit("\n".join([f"{built} is worse than {target} must be, which stays as it is:", *missed]))
    target.mkdir(parents=True, exist_ok=True)
    for file in built.iterdir():
        shutil.copyfile(file, target / file.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"), help="folder for all intermediate files")
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"), help="folder of the finished model")
    parser.add_argument("--tokens", type=float, default=28e6, help="tokens of the first cycle of its training")
    parser.add_argument("--threads", type=int, default=0, help="parts of a batch, each with a core (0: all cores)")
    args = parser.parse_args()
    out, built, scores = ("--out", str(args.out)), args.out / "model", args.out / "scores.json"
    if not (args.out / "tokenizer.json").exists():
        step("tokenizer", *out)
    if not (args.out / "tasks.json").exists():
        step("prepare", *out, "--tokens", str(args.tokens))
    step("train", *out, "--threads", str(args.threads))
    step("export", *out, "--target", str(built))
    step("evaluate", "--model", str(built), "--save", str(scores))
    step("export", *out, "--target", str(built))
    accept(built, scores, args.target)


if __name__ == "__main__":
    main()
