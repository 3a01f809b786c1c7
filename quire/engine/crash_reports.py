"""What is written when an engine core dies: settings, versions, its last log lines and stacks, requests in flight.

Called by the supervisor, on a thread. Holds no prompt, no token and no secret. The newest few reports are kept.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire import envs
from quire.config import QuireConfig
from quire.config.build import public_settings
from quire.core.engine_messages import EngineCoreRequest
from quire.core.stats import SchedulerStats
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.platforms.cpu import read_cpu
from quire.utils.cgroup import CGROUP_ROOT, PROC_ROOT, cgroup_directories
from quire.utils.memory import read_memory
from quire.utils.report_file import keep_newest, new_report_path, oom_lines, read_kernel_log, write_report
from quire.version import __version__

NUM_KEPT = 5
MAX_REQUESTS = 1000
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "msgspec", "pyzmq", "uvicorn", "starlette")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CoreRemains:
    """What is left of a core.

    Attributes:
        lived_s: seconds since its process was started.
        memory: bytes by part, as it showed them last.
        last_words: its last log lines, and its stacks where it could write them.
    """

    config: QuireConfig
    pid: int | None
    lived_s: float
    memory: dict[str, int]
    last_words: str


def reports_directory(config: QuireConfig) -> Path | None:
    """Where reports go; None = nowhere."""
    chosen = config.supervision.crash_reports
    if chosen == "none":
        return None
    if chosen != "auto":
        return Path(chosen).expanduser()
    return default_directory()


def check_reports_directory(config: QuireConfig) -> None:
    """Refuse a directory that cannot be one; it is made when there is something to report.

    Raises:
        ConfigError: it, or what it is to lie in, is a file or cannot be written to.
    """
    chosen = reports_directory(config)
    if chosen is None:
        return
    directory = chosen.absolute()
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "cannot be written to" if existing.is_dir() else "is not a directory"
        raise ConfigError(
            f"crash_reports={config.supervision.crash_reports}: {existing} {problem}",
            hint="name a directory, or use auto or none", field="crash_reports",
        )  # fmt: skip


def default_directory() -> Path | None:
    """In the user's cache; None where there is none."""
    cache = envs.cache_dir()
    return None if cache is None else cache / "reports"


def write_crash_report(
    remains: CoreRemains, reason: str, requests: Iterable[tuple[EngineCoreRequest, int]], stats: SchedulerStats | None
) -> Path | None:
    """Write what is known of a core that died; the path, None where it cannot be written or is not wanted.

    Args:
        requests: that were with it, each with the cores in a row that died while it was.
        stats: the control plane after its last step.
    """
    directory = reports_directory(remains.config)
    if directory is None:
        return None
    path = new_report_path(directory, time.time())
    oom = oom_lines(remains.pid, read_kernel_log())
    summary = {
        "reason": reason, "time": time.time(), "core_pid": remains.pid, "lived_s": round(remains.lived_s, 3),
        "memory_parts": remains.memory, "killed_for_memory": any(f"process {remains.pid} " in line for line in oom),
        "last_step": None if stats is None else msgspec.to_builtins(stats),
        "flight_recorder": remains.config.observability.flight_recorder,
    }  # fmt: skip
    parts = {
        "report.json": as_json(summary),
        "machine.json": as_json(describe_machine()),
        "config.json": as_json(public_settings(remains.config)),
        "requests.json": as_json([_request(*one) for one in requests][:MAX_REQUESTS]),
        "core.log": remains.last_words.encode(),
    }
    if oom:
        parts["kernel.log"] = "\n".join(oom).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_report(path, parts)
        keep_newest(directory, NUM_KEPT)
    except OSError as error:
        logger.warning("no report of the crash can be written to %s: %s", directory, error.strerror)
        return None
    logger.error("the engine core's crash is described in %s", path)
    return path


def describe_machine() -> dict[str, Any]:
    """Versions, processor and memory, without loading anything."""
    name, flags = read_cpu(PROC_ROOT)
    memory = read_memory()
    return {
        "quire": __version__, "python": sys.version.split()[0], "os": platform.platform(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cpu": name, "cpu_flags": sorted(flags), "num_cpus": os.cpu_count(),
        "memory_total_bytes": memory.total_bytes, "memory_available_bytes": memory.available_bytes,
        "memory_limited_by": memory.limited_by, "oom_kills_of_the_group": oom_count(),
    }  # fmt: skip


def oom_count(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Processes of this control group that the kernel killed for memory."""
    for directory in cgroup_directories("memory", PROC_ROOT, cgroup_root):
        try:
            lines = (directory / "memory.events").read_text().splitlines()
        except OSError:
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def as_json(value: Any) -> bytes:
    """For people."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)


def _request(message: EngineCoreRequest, num_deaths: int) -> dict[str, Any]:
    """Of a request what is neither its text nor its tokens."""
    params = message.sampling_params
    output = message.output_token_ids
    return {
        "id": message.request_id, "handle": message.handle, "tenant": message.tenant, "priority": message.priority,
        "prompt_tokens": len(message.prompt_token_ids), "output_tokens": 0 if output is None else len(output),
        "max_tokens": params.max_tokens, "temperature": params.temperature, "n": params.n,
        "is_structured": params.structured_outputs is not None, "cores_lost_with_it": num_deaths,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
