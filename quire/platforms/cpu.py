"""What the CPU offers, from /proc/cpuinfo (which lists only what the operating system has enabled too)."""

from __future__ import annotations

from pathlib import Path

from quire.utils.cgroup import PROC_ROOT

_FLAG_FIELDS = ("flags", "Features")
_NAME_FIELDS = ("model name", "Hardware", "CPU part")


def read_cpu(proc_root: Path = PROC_ROOT) -> tuple[str, frozenset[str]]:
    """(name, instruction set flags) of the first CPU; ("unknown", empty) where /proc/cpuinfo is missing."""
    try:
        lines = (proc_root / "cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown", frozenset()
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = " ".join(fields.get(name, "") for name in _FLAG_FIELDS)
    cpu_name = next((fields[name] for name in _NAME_FIELDS if name in fields), "unknown")
    return cpu_name, frozenset(flags.split())
