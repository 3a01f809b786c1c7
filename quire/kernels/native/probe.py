"""Can the native kernels be used here? Asked by the engine before it chooses a backend; imports no torch."""

from __future__ import annotations

from quire.errors import NativeLibraryError
from quire.kernels.native.library import load_library


def native_problem() -> str | None:
    """Why the native kernels cannot be used, in one line; None = they can."""
    try:
        load_library()
    except NativeLibraryError as error:
        return error.message
    return None
