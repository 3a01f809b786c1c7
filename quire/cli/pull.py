"""Download a model from the hub into the cache that all programs share, and print where it is.

    quire pull Qwen/Qwen3-0.6B
    quire pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M

Only what is missing is fetched, also after a download was interrupted or killed; every file is verified. Of the
environment HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and the proxies' variables are read.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from quire.models.hub_download import DownloadPlan
from quire.models.pull import pull_model
from quire.utils.memory import format_bytes

LINE_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "model_argument", metavar="MODEL", help="ORG/NAME, or ORG/NAME:QUANT for a GGUF file of this quantization."
    )
    parser.add_argument("--revision", metavar="NAME", help="Branch, tag or commit; default: main.")
    parser.add_argument(
        "--include", metavar="PATTERN", nargs="+", default=[],
        help="Fetch the files that match, such as '*.json', in place of those that are needed to run the model.",
    )  # fmt: skip
    parser.add_argument("--download-dir", metavar="DIR", help="Another cache directory, as quire serve takes it.")
    parser.add_argument(
        "--verify", action="store_true", help="Read what is there, too, and fetch again what is damaged."
    )


def run(args: argparse.Namespace) -> int:
    """Download; prints the model's directory or GGUF file to stdout, everything else to stderr."""
    with DownloadBar(args.model_argument) as bar:
        pulled = pull_model(
            args.model_argument, args.revision, args.download_dir, include=args.include, verifies=args.verify,
            on_plan=bar.begin, progress=bar.show,
        )  # fmt: skip
    files, fetched = pulled.plan.files, pulled.plan.missing
    size = format_bytes(sum(file.num_bytes for file in files))
    done = f"{len(fetched)} fetched and verified" if fetched else "all were there"
    print(f"{pulled.plan.repo} at {pulled.plan.commit[:12]}: {len(files)} files, {size}; {done}", file=sys.stderr)
    print(pulled.path)
    return 0


class DownloadBar:
    """A progress bar on a terminal; elsewhere a line every ten seconds. Both on stderr.

    Args:
        name: of what is downloaded.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._next_line_s = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, plan: DownloadPlan) -> None:
        """So much is to be fetched."""
        if not plan.missing:
            return
        kept = f", {format_bytes(plan.partial_bytes)} of it there already" if plan.partial_bytes else ""
        total = plan.num_bytes + plan.partial_bytes
        print(f"{self._name}: {len(plan.missing)} files, {format_bytes(total)}{kept}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            self._open(total)

    def show(self, done: int, total: int) -> None:
        """So many bytes are there."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s += LINE_EVERY_S
            print(f"{format_bytes(done)} of {format_bytes(total)}", file=sys.stderr, flush=True)

    def _open(self, total: int) -> None:
        from rich.console import Console  # late: only a terminal needs it
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()
