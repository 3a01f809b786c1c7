"""Write what somebody needs who looks into a problem: machine, settings, state, metrics, last crashes.

    quire report
    quire report --url http://127.0.0.1:8000 --api-key OPERATOR_KEY --output report.tar.gz

Reports of crashes that servers wrote by themselves are included; --list names them. Prompts, tokens and keys are left
out; --flight-recorder DIR adds the newest recording, which has prompts as token ids.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from quire import envs
from quire.cli.collect_env import collect
from quire.engine.crash_reports import as_json, default_directory
from quire.errors import ConfigError, QuireError
from quire.flight_recorder.records import SUFFIX as RECORDING
from quire.utils.http_get import get
from quire.utils.report_file import new_report_path, reports_in, write_report

DEFAULT_URL = "http://127.0.0.1:8000"
PAGES = {"state.json": "/debug/state", "config.json": "/debug/config", "requests.json": "/debug/requests"}
NUM_CRASHES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--url", default=None, help=f"address of a running server; default: {DEFAULT_URL}, if there")
    parser.add_argument("--api-key", default=None, help="an operator's key; default: the first of QUIRE_API_KEY")
    parser.add_argument("--output", type=Path, default=None, help="the archive; default: one in this directory")
    parser.add_argument("--crash-reports", type=Path, default=None, help="directory that the server writes reports to")
    parser.add_argument("--flight-recorder", type=Path, default=None, help="add the newest recording of this directory")
    parser.add_argument("--list", action="store_true", help="name the reports of crashes, and write nothing")


def run(args: argparse.Namespace) -> int:
    """Write the archive, and print its path."""
    directory = args.crash_reports or default_directory()
    crashes = [] if directory is None else reports_in(directory)
    if args.list:
        print("\n".join(map(str, crashes)) or f"no reports of crashes in {directory}")
        return 0
    parts = {"machine.json": as_json(collect()), **_of_server(args.url, args.api_key)}
    for path in crashes[-NUM_CRASHES:]:
        parts[f"crashes/{path.name}"] = path.read_bytes()
    if args.flight_recorder is not None:
        newest = _newest_recording(args.flight_recorder)
        parts[f"recording/{newest.name}"] = newest.read_bytes()
    path = args.output or new_report_path(Path(), time.time())
    try:
        write_report(path, parts)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="output") from None
    print(f"{path}: {', '.join(parts)}")
    return 0


def _of_server(url: str | None, api_key: str | None) -> dict[str, bytes]:
    """What a server shows; why, where it does not."""
    keys = envs.api_keys()
    key = api_key or (keys[0] if keys else None)
    parts = {}
    for name, page in {**PAGES, "metrics.txt": "/metrics"}.items():
        try:
            parts[name] = get(url or DEFAULT_URL, page, key)
        except QuireError as error:
            if url is None and isinstance(error, ConfigError):  # none was asked for, and none is there
                return parts
            parts[f"{name}.error"] = str(error).encode()
    return parts


def _newest_recording(directory: Path) -> Path:
    found = sorted(directory.glob(f"*{RECORDING}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"{directory} has no recording", hint="name the directory of the server's --flight-recorder")
    return found[-1]
