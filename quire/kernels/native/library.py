"""Loads the C++ library and says which of its tiers this machine can run, and why not the others.

Called by `runtime`, the engine's factory and `collect-env`. Keeps what it found: a tier is tested once per process.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from quire import envs
from quire.errors import ConfigError, NativeLibraryError, unknown_name
from quire.logger import get_logger

logger = get_logger(__name__)

MODULE_NAME = "quire.kernels.native._quire_native"
# A tier that only tests force: the tile unit done in plain C++.
EMULATED_TIER = "amx_emulated"
# Far above the milliseconds that a self-test takes, for machines that are busy or read the library from a slow disk.
SELF_TEST_TIMEOUT_MS = 10_000
NOT_OFFERED = "the CPU or the operating system does not support its instructions"


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of the build on this machine: `problem` is None when it runs here, otherwise why it does not."""

    name: str
    problem: str | None


def load_library() -> Any:
    """The extension module: the installed one, or the one that QUIRE_NATIVE_LIBRARY names.

    Raises:
        NativeLibraryError: it was not built, is damaged, or was built for another Python.
    """
    path = envs.native_library()
    try:
        library = _load(path)
    except (ImportError, OSError) as cause:
        unset = "" if path is None else "unset QUIRE_NATIVE_LIBRARY, or "
        raise NativeLibraryError(
            f"the native kernels cannot be loaded: {cause}",
            hint=f"{unset}build them: install a C++17 compiler (Debian: apt-get install g++) and install quire again, "
            "or use attention_backend='torch_reference'",
            field="native library",
        ) from cause
    return library


def tier_names() -> list[str]:
    """Every tier of the build, best first, the emulated one last."""
    return list(load_library().tier_names())


def examine_tiers() -> tuple[TierReport, ...]:
    """The tiers of the build, best first, without the emulated one.

    A tier runs here when the CPU has its instructions, the operating system saves its registers and permits them, and
    its kernels, run in a child process, gave the bits of the portable tier. One that fails only the last is logged.
    """
    return _examine(load_library())


def tier_problems() -> dict[str, str | None]:
    """Tier -> why it does not run here, None = it does; best first. Empty where the library cannot be loaded."""
    try:
        return {report.name: report.problem for report in examine_tiers()}
    except NativeLibraryError:
        return {}


def supported_tiers() -> list[str]:
    """The tiers that run here, best first; without the emulated one."""
    return [report.name for report in examine_tiers() if report.problem is None]


def choose_tier(tier: str) -> str:
    """The name of a tier that runs here: for "auto" that of QUIRE_KERNEL_TIER, or the best.

    Raises:
        ConfigError: no such tier, or it does not run on this machine; says why.
    """
    if tier == "auto":
        tier = envs.kernel_tier() or "auto"
    if tier == EMULATED_TIER and tier in tier_names():
        return tier
    problems = {report.name: report.problem for report in examine_tiers()}
    supported = supported_tiers()
    if tier == "auto":
        return supported[0]
    if tier not in problems:
        raise unknown_name("kernel tier", tier, ["auto", *problems])
    if problems[tier] is not None:
        raise ConfigError(
            f"kernel tier {tier!r} does not run on this machine: {problems[tier]}",
            hint=f"use 'auto', or one of {', '.join(supported)}",
            field="kernel_tier",
        )
    return tier


@functools.cache
def _examine(library: Any) -> tuple[TierReport, ...]:
    reports = [
        TierReport(name, _problem(library, index, name))
        for index, name in enumerate(library.tier_names())
        if name != EMULATED_TIER
    ]
    for report in reports:
        if report.problem not in (None, NOT_OFFERED):
            logger.warning("kernel tier %s is not used: %s", report.name, report.problem)
    return tuple(reports)


def _load(path: Path | None) -> Any:
    """The module in this file, or the installed one; once per process."""
    if MODULE_NAME in sys.modules:
        return sys.modules[MODULE_NAME]
    spec = find_spec(MODULE_NAME) if path is None else spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None or spec.origin is None:
        raise ImportError("it was not built" if path is None else f"{path} is not an extension module")
    _refuse_cut(Path(spec.origin))
    if path is None:
        return import_module(MODULE_NAME)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[MODULE_NAME] = module
    return module


def _refuse_cut(path: Path) -> None:
    """The system's loader is ended by a signal when it maps a file that a full disk cut short."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return
    # The table of sections is the end of an ELF file: its place, the size of an entry, their number.
    place, entry, count = (int.from_bytes(header[at : at + size], "little") for at, size in ((40, 8), (58, 2), (60, 2)))
    expected, actual = place + entry * count, path.stat().st_size
    if actual < expected:
        raise ImportError(f"{path} has {actual} of its {expected} bytes")


def _problem(library: Any, index: int, name: str) -> str | None:
    if not library.is_tier_supported(index):
        return NOT_OFFERED
    if name == "portable":
        return None  # what the others are compared with
    return library.self_test(index, SELF_TEST_TIMEOUT_MS, 0) or None
