"""Makes `leaf` from nothing: `python -m training.build --hours 1.9`.

Runs tokenizer, prepare, train, evaluate and export one after the other, each in
its own process. Steps whose products exist are skipped, so a cut-off build goes
on where it stopped; delete the build folder to start over.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def step(module: str, *arguments: str) -> None:
    """Runs `python -m training.<module>`; raises CalledProcessError if it fails."""
    print(f"== training.{module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"training.{module}", *arguments], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"), help="folder for all intermediate files")
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"), help="folder of the finished model")
    parser.add_argument("--hours", type=float, default=1.9, help="wall-clock time of the training itself")
    parser.add_argument("--samples", type=int, default=280000, help="conversations to generate")
    args = parser.parse_args()
    out = ("--out", str(args.out))
    if not (args.out / "tokenizer.json").exists():
        step("tokenizer", *out)
    if not (args.out / "tasks.json").exists():
        step("prepare", *out, "--samples", str(args.samples))
    step("train", *out, "--hours", str(args.hours))
    step("export", *out, "--target", str(args.target))
    step("evaluate", "--model", str(args.target), "--save", str(args.out / "scores.json"))
    step("export", *out, "--target", str(args.target))


if __name__ == "__main__":
    main()
