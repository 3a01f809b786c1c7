"""Reading small files of a model directory without trusting them.

Called by the tokenizer loader and the chat template finder. Owns no state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import TokenizerError
from quire.formats.gguf_file import is_gguf

MIB = 1 << 20


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of regular file `path`.

    Raises:
        TokenizerError: it is not a regular file, is larger than `max_bytes`, or cannot be read.
    """
    try:
        if not path.is_file():
            raise TokenizerError(f"{path} is not a regular file", hint="download the model again", field=path.name)
        size = path.stat().st_size
        if size > max_bytes:
            raise TokenizerError(
                f"{path} has {size} bytes, at most {max_bytes} are allowed",
                hint="this is not a tokenizer file of a known kind; download the model again",
                field=path.name,
            )
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"cannot read {path}: {error}", hint="check the file's permissions", field=path.name
        ) from error


def read_text(path: Path, max_bytes: int) -> str:
    """The content of `path` as UTF-8; errors as `read_bytes`."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path} is not UTF-8: {error}", hint="download the file again", field=path.name
        ) from error


def read_json_object(path: Path, max_bytes: int = 32 * MIB) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, max_bytes))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON: {error}", hint="download the file again", field=path.name
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a JSON {type(value).__name__}, an object is needed", field=path.name)
    return value


def check_tokenizer_files(directory: Path) -> None:
    """See that a directory has a tokenizer, without reading it. A GGUF file is read where its tokenizer is loaded.

    Raises:
        TokenizerError: it has none.
    """
    if is_gguf(directory) and not directory.is_dir():
        return
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise no_tokenizer(directory)


def no_tokenizer(directory: Path) -> TokenizerError:
    """The error of a directory without a tokenizer."""
    return TokenizerError(
        f"no tokenizer.json and no tokenizer.model in {directory}",
        hint="put the model's tokenizer files there, pass another directory with tokenizer=..., or use token "
        "ids only: skip_tokenizer_init=True",
        field="tokenizer",
    )
