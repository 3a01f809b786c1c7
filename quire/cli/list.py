"""List the models of the hub that are on this disk, with the names that quire run, serve and rm take.

They are those of the cache that all programs share (HF_HUB_CACHE, HF_HOME). "incomplete" is what an interrupted
download has left, which quire pull continues.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.models.hub_cache import CachedModel, HubCache
from quire.models.pull import model_cache
from quire.models.repo_files import gguf_models, missing_parts
from quire.utils.memory import format_bytes

AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class Listed:
    """A line: what can be run by one name.

    Attributes:
        model: "org/name", or "org/name:QUANT".
        format: "safetensors" or "gguf"; "incomplete" where files are missing, "other" where none can be read.
        num_bytes: of its files.
        revision: the branches and tags that are at `commit`.
        modified_s: seconds since 1970.
        path: its directory or GGUF file.
    """

    model: str
    format: str
    num_bytes: int
    revision: str
    commit: str
    modified_s: float
    path: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--download-dir", metavar="DIR", help="Another cache directory, as quire serve takes it.")
    parser.add_argument("--json", action="store_true", help="Print one JSON list.")


def run(args: argparse.Namespace) -> int:
    """Print a table."""
    cache = model_cache(args.download_dir)
    listed = [line for model in cache.models() for line in lines_of(cache, model)]
    if args.json:
        print(json.dumps([asdict(one) for one in listed], indent=1))
    elif not listed:
        print(f"no models in {cache.root}; quire pull ORG/MODEL downloads one")
    else:
        _print_table(listed)
    return 0


def lines_of(cache: HubCache, model: CachedModel) -> Iterator[Listed]:
    """What there is of a repository."""
    if not model.files and model.num_bytes:
        path = str(cache.directory(model.repo))
        yield Listed(model.repo, "incomplete", model.num_bytes, "", "", model.modified_s, path)
    for commit in model.files:
        yield from _lines_of_commit(cache, model, commit)


def _lines_of_commit(cache: HubCache, model: CachedModel, commit: str) -> Iterator[Listed]:
    """A directory in Hugging Face format, and each quantization of GGUF files."""
    names, place = model.files[commit], cache.snapshot(model.repo, commit)
    revision = ",".join(name for name, at in model.refs.items() if at == commit)

    def line(name: str, kind: str, files: Iterable[str], path: Path) -> Listed:
        num_bytes = sum((place / file).stat().st_size for file in files)
        return Listed(name, kind, num_bytes, revision, commit, model.modified_s, str(path))

    ggufs = gguf_models(names)
    for gguf in ggufs:
        name = f"{model.repo}:{gguf.quant or gguf.name + '.gguf'}"
        yield line(name, "incomplete" if missing_parts(gguf) else "gguf", gguf.paths, place / gguf.paths[0])
    others = [name for name in names if not name.endswith(".gguf")]
    kind = "safetensors" if any(name.endswith(".safetensors") for name in others) else "other"
    if kind != "other" or not ggufs:
        yield line(model.repo, kind, others, place)


def _print_table(listed: list[Listed]) -> None:
    rows = [("MODEL", "FORMAT", "SIZE", "REVISION", "COMMIT", "MODIFIED")]
    rows += [
        (one.model, one.format, format_bytes(one.num_bytes), one.revision, one.commit[:12], _age(one.modified_s))
        for one in listed
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _age(modified_s: float) -> str:
    seconds = max(0.0, time.time() - modified_s)
    for unit, name in AGES:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
