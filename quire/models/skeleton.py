"""A model of the hub without its weights' data: descriptions, and weight files that are sparse behind their headers.

Called by `quire inspect`, which then looks at a directory like any other. Owns nothing; the directory is the caller's.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

from quire.errors import HubUnreachableError, ModelError
from quire.formats.gguf_file import GGUFPart
from quire.models.hub_client import NETWORK_ERRORS, HubClient, HubFile
from quire.models.hub_file import Digest
from quire.models.pull import DEFAULT_REVISION
from quire.models.repo_files import checked_name, choose_files
from quire.models.safetensors_header import MAX_HEADER_BYTES

MAX_DESCRIPTION_BYTES = 64 << 20
FIRST_BYTES = 256 << 10  # of a safetensors file: most headers are shorter
# Of a GGUF file, whose header has the vocabulary; further parts of a split one have a short header.
GGUF_BYTES, GGUF_PART_BYTES = 32 << 20, 1 << 20
FACTORS = re.compile(r"rope_\w+(\.weight)?")

Read = Callable[[int, int], bytes]


def fetch_skeleton(model: str, revision: str | None, directory: Path) -> Path:
    """Fetch what can be looked at into `directory`; returns it, or the first GGUF file in it.

    Raises:
        ModelError: the hub refuses, or a description is not what the hub lists.
        HubUnreachableError: the hub does not answer.
    """
    repo, quant = checked_name(model)
    client = HubClient()
    commit = client.commit(repo, revision or DEFAULT_REVISION)
    files = {file.name: file for file in client.files(repo, commit)}
    choice = choose_files(repo, files, quant)
    for name in choice.paths:
        file, path = files[name], directory / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def read(begin: int, end: int, file: HubFile = file) -> bytes:
            return _read(client, repo, commit, file.name, begin, min(end, file.num_bytes))

        if name.endswith(".safetensors"):
            path.write_bytes(_safetensors_header(read))
        elif choice.gguf is not None:
            path.write_bytes(read(0, GGUF_BYTES if name == choice.gguf else GGUF_PART_BYTES))
        else:
            path.write_bytes(_description(read, file))
        fetched = path.stat().st_size
        os.truncate(path, file.num_bytes)
        if choice.gguf is not None:
            _add_factors(path, fetched, read)
    return directory if choice.gguf is None else directory / choice.gguf


def _read(client: HubClient, repo: str, commit: str, name: str, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` - 1 of a file; fewer where the connection breaks."""
    if begin >= end:
        return b""
    try:
        with client.open(repo, commit, name, begin, end) as (stream, place):
            parts, left = [], end - place
            while left and (part := stream.read(left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)[begin - place :]
    except NETWORK_ERRORS as error:
        raise HubUnreachableError(f"the transfer of {name} broke: {error}", hint="try again", field="model") from error


def _safetensors_header(read: Read) -> bytes:
    data = read(0, FIRST_BYTES)
    if len(data) < 8:
        return data
    (header_size,) = struct.unpack("<Q", data[:8])
    end = 8 + min(header_size, MAX_HEADER_BYTES)
    return data[:end] + read(len(data), end)


def _add_factors(path: Path, fetched: int, read: Read) -> None:
    """Fetch what a GGUF file says of its model in tensors: factors of the rotary embedding."""
    with path.open("r+b") as file:
        for tensor in GGUFPart(path).header.tensors.values():
            end = tensor.offset + tensor.num_bytes
            if FACTORS.fullmatch(tensor.name) and end > fetched and tensor.num_bytes <= GGUF_PART_BYTES:
                file.seek(tensor.offset)
                file.write(read(tensor.offset, end))


def _description(read: Read, file: HubFile) -> bytes:
    if file.num_bytes > MAX_DESCRIPTION_BYTES:
        return b""
    data = read(0, file.num_bytes)
    digest = Digest(file)
    digest.update(data)
    if not digest.is_right():
        raise ModelError(f"{file.name} is not what the hub lists", hint="try again", field=file.name)
    return data
