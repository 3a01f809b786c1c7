"""Reads JSON objects from a model directory, whose files may be missing, huge or hostile. No state."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path

from quire.errors import ModelError


def read_json_object(path: Path, max_bytes: int, error: type[ModelError] = ModelError) -> dict[str, object]:
    """The object in file `path`.

    Raises:
        ModelError: (or `error`) the file is missing, no regular file, too large, or holds no JSON object.
    """
    return parse_json_object(read_small_file(path, max_bytes, error), path, error)


def read_small_file(path: Path, max_bytes: int, error: type[ModelError] = ModelError) -> bytes:
    """The contents of regular file `path`, at most `max_bytes`."""
    size = regular_file_size(path, error)
    if size > max_bytes:
        hint = f"a file of this name has at most {max_bytes} bytes"
        raise error(f"{path} has {size} bytes", hint=hint, field=path.name)
    try:
        return path.read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}", hint="check the permissions", field=path.name) from cause


def regular_file_size(path: Path, error: type[ModelError] = ModelError) -> int:
    """Bytes of regular file `path` (links are followed)."""
    try:
        status = path.stat()
    except OSError as cause:
        raise error(
            f"{path} cannot be read: {cause.strerror}", hint="check that the download is complete", field=path.name
        ) from cause
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is not a regular file", hint="replace it by the file itself", field=path.name)
    return status.st_size


def parse_json_object(text: bytes, path: Path, error: type[ModelError] = ModelError) -> dict[str, object]:
    """The object that UTF-8 `text` holds; NaN, infinities and repeated keys are refused.

    Args:
        path: where it came from, for messages.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"key {repeated[:80]!r} appears more than once")
        return found

    def refuse_constant(name: str) -> object:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except RecursionError as cause:
        raise error(f"{path}: JSON is nested too deeply", hint="download the file again", field=path.name) from cause
    except ValueError as cause:
        raise error(f"{path}: invalid JSON: {cause}", hint="download the file again", field=path.name) from cause
    if not isinstance(value, dict):
        raise error(f"{path}: contains a {type(value).__name__}", hint="it must be a JSON object", field=path.name)
    return value
