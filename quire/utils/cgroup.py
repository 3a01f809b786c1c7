"""The cgroups this process is in, of version 1 and 2, with or without a cgroup namespace. Pure readers; no state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC_ROOT = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def cgroup_directories(controller: str, proc_root: Path, cgroup_root: Path) -> Iterator[Path]:
    """This process's directory in each hierarchy that has `controller`, then its parents up to the mount point.

    Inside a container the path in /proc may not exist under the mount; the parents that do exist are visited.
    """
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in _mounts(controllers, controller, cgroup_root):
            yield from _upwards(mount, path)


def _mounts(controllers: str, controller: str, cgroup_root: Path) -> list[Path]:
    """Where a hierarchy may be mounted: v1 (named controllers) has a folder per controller set, v2 has none."""
    if not controllers:
        return [cgroup_root, cgroup_root / "unified"]
    return [cgroup_root / name for name in dict.fromkeys((controller, controllers))]


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Existing directories from mount/path up to mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        directory = mount.joinpath(*parts[:depth])
        if directory.is_dir():
            yield directory


def read_number(path: Path) -> int | None:
    """The number in a one-line file; None when there is no such file or no number ("max")."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None
