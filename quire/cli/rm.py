"""Remove models of the hub from this disk, from the cache that all programs share.

    quire rm Qwen/Qwen3-0.6B
    quire rm bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0

With :QUANT only that GGUF file is removed. What a running server has open stays readable to it until it ends.
"""

from __future__ import annotations

import argparse

from quire.errors import ModelError
from quire.models.hub import EMBEDDED_MODEL
from quire.models.hub_cache import HubCache
from quire.models.pull import model_cache
from quire.models.repo_files import checked_name, gguf_models, models_of_quant
from quire.utils.memory import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", help="ORG/NAME or ORG/NAME:QUANT, as quire list shows it."
    )
    parser.add_argument("--download-dir", metavar="DIR", help="Another cache directory, as quire serve takes it.")


def run(args: argparse.Namespace) -> int:
    """Remove each; what is not there is an error, found before anything is removed."""
    cache = model_cache(args.download_dir)
    for name in args.models:
        _check(cache, name)
    for name in args.models:
        print(f"removed {name}: {format_bytes(_remove(cache, name))}")
    return 0


def _check(cache: HubCache, name: str) -> None:
    if name == EMBEDDED_MODEL:
        raise ModelError("'leaf' is a part of this installation", hint="it takes a few MiB; leave it", field="model")
    repo, quant = checked_name(name)
    if not cache.directory(repo).is_dir():
        raise ModelError(f"model {name!r} is not in {cache.root}", hint="quire list shows what is", field="model")
    if quant is not None:
        _files(cache, repo, quant)


def _remove(cache: HubCache, name: str) -> int:
    repo, quant = checked_name(name)
    if quant is None:
        return cache.remove(repo) if cache.directory(repo).is_dir() else 0
    freed = cache.remove_files(repo, _files(cache, repo, quant))
    is_empty = not any(cache.model(repo).files.values())
    return freed + (cache.remove(repo) if is_empty else 0)


def _files(cache: HubCache, repo: str, quant: str) -> list[str]:
    """Names of the quantization's files, of all commits."""
    models = [model for names in cache.model(repo).files.values() for model in gguf_models(names)]
    found = {path for model in models_of_quant(models, quant) for path in model.paths}
    if not found:
        known = ", ".join(sorted({model.quant or model.name for model in models})) or "no GGUF file"
        raise ModelError(f"{repo} has no file of {quant!r} in {cache.root}", hint=f"it has {known}", field="model")
    return sorted(found)
