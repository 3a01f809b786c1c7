"""Reports: compressed archives of small files about a process, of which a directory keeps the newest few. No state."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX, SUFFIX = "quire-report-", ".tar.gz"
MAX_PART_BYTES = 16 << 20


def write_report(path: Path, parts: Mapping[str, bytes]) -> None:
    """Write an archive that only this user can read; of parts that are too long, the end is kept.

    Raises:
        OSError: it cannot be written.
    """
    folder = path.name.removesuffix(SUFFIX)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive,
        ):
            for name, content in parts.items():
                info = tarfile.TarInfo(f"{folder}/{name}")
                body = content[-MAX_PART_BYTES:]
                info.size, info.mtime, info.mode = len(body), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(body))
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def new_report_path(directory: Path, now_s: float) -> Path:
    """Where a report of now goes; names sort by time."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return directory / f"{PREFIX}{when}-{int(now_s * 1000) % 1000:03d}-{os.getpid()}{SUFFIX}"


def reports_in(directory: Path) -> list[Path]:
    """Reports of a directory, the oldest first."""
    with contextlib.suppress(OSError):
        return sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))
    return []


def keep_newest(directory: Path, count: int) -> None:
    """Delete reports beyond the newest `count`."""
    for path in reports_in(directory)[:-count]:
        with contextlib.suppress(OSError):
            path.unlink()


def oom_lines(pid: int | None, text: str) -> list[str]:
    """Lines of the kernel's log that say that processes were killed for memory, this one's first."""
    words = ("ut of memory", "oom-kill", "oom_reaper")
    found = [line for line in text.splitlines() if any(word in line for word in words)]
    return sorted(found[-20:], key=lambda line: f" {pid} " not in f"{line.replace('(', ' ').replace(',', ' ')} ")


def read_kernel_log(path: str = "/dev/kmsg") -> str:
    """The kernel's messages, as far as this user may read them; empty where not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    lines: list[bytes] = []
    try:
        while line := os.read(fd, 8192):
            lines.append(line)
    except OSError:  # read to its end, or overwritten meanwhile
        pass
    finally:
        os.close(fd)
    return b"".join(lines).decode(errors="replace")
