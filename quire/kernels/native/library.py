"""Loads the C++ library and says which of its tiers this machine can run.

Called by `runtime`. No state: Python's import system loads the extension module once per process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.errors import NativeLibraryError

# A tier that only tests force: the tile unit done in plain C++.
EMULATED_TIER = "amx_emulated"


def load_library() -> Any:
    """The extension module.

    Raises:
        NativeLibraryError: it was not built, or was built for another Python.
    """
    try:
        return import_module("quire.kernels.native._quire_native")
    except ImportError as cause:
        raise NativeLibraryError(
            f"the native kernels cannot be loaded: {cause}",
            hint="build them: install a C++17 compiler (Debian: apt-get install g++) and install quire again, "
            "or use attention_backend='torch_reference'",
            field="native library",
        ) from cause


def tier_names() -> list[str]:
    """Every tier of the build, best first, the emulated one last."""
    return list(load_library().tier_names())


def supported_tiers() -> list[str]:
    """The tiers that this CPU and operating system run, best first; without the emulated one."""
    library = load_library()
    return [
        name
        for index, name in enumerate(library.tier_names())
        if name != EMULATED_TIER and library.is_tier_supported(index)
    ]
