"""A table of a profile: time by kernel or operation, how often it ran, and the rates that products reached.

    quire profile summary profiles/20261123-201500-4711-64-steps.json

Reads files of --profile, and those of torch's profiler beside them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.errors import ConfigError

MAX_BYTES = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a profile")
    parser.add_argument("--top", type=int, default=30, help="lines to show")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    rows = summarize(read_events(args.file))
    if args.json:
        print(json.dumps({"rows": rows}))
        return 0
    table = Table(box=None, header_style="bold")
    for name in ("name", "calls", "total ms", "mean us", "share", "GFLOP/s", "GB/s"):
        table.add_column(name, justify="left" if name == "name" else "right")
    for row in rows[: args.top]:
        seconds = row["total_us"] * 1e-6
        rates = (f"{row[name] / seconds / 1e9:.1f}" if row[name] and seconds else "" for name in ("flops", "bytes"))
        table.add_row(
            row["name"], f"{row['calls']:,}", f"{row['total_us'] / 1e3:,.2f}", f"{row['total_us'] / row['calls']:,.1f}",
            f"{row['share']:.1%}", *rates,
        )  # fmt: skip
    Console().print(table)
    return 0


def read_events(path: Path) -> list[dict[str, Any]]:
    """The spans of a trace.

    Raises:
        ConfigError: it is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 30} GiB", field="file")
        events = json.loads(path.read_text())["traceEvents"]
        spans = [one for one in events if one.get("ph") == "X" and isinstance(one.get("dur"), (int, float))]
        if not all(isinstance(one["name"], str) for one in spans):
            raise KeyError("name")
        return spans
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="file") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a profile", hint="name a file that --profile wrote", field="file") from None


def summarize(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By name, the longest in sum first; shares are of the steps where there are some, else of all spans."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"calls": 0, "total_us": 0.0, "flops": 0.0, "bytes": 0.0})
    for span in spans:
        row, about = found[span["name"]], span.get("args") or {}
        row["calls"] += 1
        row["total_us"] += span["dur"]
        for name in ("flops", "bytes"):
            row[name] += about.get(name, 0.0) if isinstance(about.get(name, 0.0), (int, float)) else 0.0
    of_steps = sum(row["total_us"] for name, row in found.items() if name.startswith("step: "))
    whole = of_steps or sum(row["total_us"] for row in found.values()) or 1.0
    rows = [{"name": name, **row, "share": row["total_us"] / whole} for name, row in found.items()]
    return sorted(rows, key=lambda row: -row["total_us"])
