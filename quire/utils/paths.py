"""Whether a file or a directory that a setting names can be used, asked before anything costly is started."""

from __future__ import annotations

import os
from pathlib import Path


def why_no_file(path: Path) -> str | None:
    """Why a file can be neither written nor made; None = it can."""
    if path.exists() and not path.is_file():
        return "it is not a file"
    if not path.exists() and not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "this user cannot write to it"
    return None


def why_no_directory(path: Path) -> str | None:
    """Why a directory can be neither written to nor made; None = it is there now, and can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        return "it is not a directory"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(path, os.W_OK | os.X_OK) else "this user cannot write to it"
