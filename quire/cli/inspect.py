"""Describe a model, what it would take, and whether it runs here, without reading its weights.

    quire inspect Qwen/Qwen3-0.6B
    quire inspect ./model --requests 32 --tokens 8k --quantization int4
    quire inspect ./model --json

Takes the engine's flags, as far as they change what is needed. Of a model that is not on this disk, its descriptions
and the headers of its weights are fetched. The exit status is 0 if it runs here, 1 if it does not, 2 if there is no
such model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire import envs
from quire.cli.serve import chosen_model
from quire.config.build import SECTIONS, build_config
from quire.engine.shipped_drafters import with_shipped_drafter
from quire.entrypoints.args import add_engine_arguments, values_from_args
from quire.errors import ModelError
from quire.logger import configure_logging
from quire.models.hub import EMBEDDED_MODEL, resolve_model_path
from quire.models.repo_files import checked_name
from quire.plan.inspection import Inspection, MemoryNeed, inspect_model
from quire.utils.checks import check_int
from quire.utils.memory import format_bytes
from quire.utils.sizes import parse_size

EXIT_DOES_NOT_RUN = 1
MAX_COUNT = 1 << 30
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    group = parser.add_argument_group("load")
    group.add_argument("--requests", type=int, default=1, metavar="INT", help="Requests at once.")
    group.add_argument("--tokens", type=parse_size, metavar="INT", help="Tokens of each; default: max_model_len.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was found; returns the exit status."""
    configure_logging(envs.log_level("WARNING"))
    check_int("requests", args.requests, 1, MAX_COUNT)
    if args.tokens is not None:
        check_int("tokens", args.tokens, 1, MAX_COUNT)
    values = values_from_args(args, SECTIONS)
    config = build_config(**{**values, **chosen_model(args, values.get("model"))})
    directory = config.load.download_dir
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(model_on_disk(config.model.model, config.model.revision, directory))
        config, drafter = with_shipped_drafter(config, path), None
        speculative = config.speculative
        if speculative is not None and speculative.model is not None:
            drafter = stack.enter_context(model_on_disk(speculative.model, speculative.revision, directory))
        found = inspect_model(config, path, args.requests, args.tokens, drafter)
    print(json.dumps(as_record(found), indent=1) if args.json else as_text(found))
    return 0 if found.runs_here else EXIT_DOES_NOT_RUN


@contextlib.contextmanager
def model_on_disk(model: str, revision: str | None, directory: str | None) -> Iterator[Path]:
    """The model's directory or file; of one that is only on the hub, one without the weights' data.

    Args:
        directory: of downloaded models; None = the default one.
    """
    if model == EMBEDDED_MODEL or Path(model).expanduser().exists() or not _is_hub_name(model):
        yield resolve_model_path(model, revision, directory)
        return
    from quire.models.pull import cached_model  # late: HTTP takes a while to import
    from quire.models.skeleton import fetch_skeleton

    cached = cached_model(model, revision, directory)
    if cached is not None:
        yield cached
        return
    if envs.hub_is_offline():
        raise ModelError(
            f"model {model!r} is not in the local cache, and HF_HUB_OFFLINE is set", hint="unset it", field="model"
        )
    with tempfile.TemporaryDirectory(prefix="quire-inspect-") as temporary:
        yield fetch_skeleton(model, revision, Path(temporary))


def _is_hub_name(model: str) -> bool:
    try:
        checked_name(model)
    except ModelError:
        return False
    return True


def as_record(found: Inspection) -> dict[str, Any]:
    """What was found as plain data."""
    record = dataclasses.asdict(found)
    if found.weights is not None:
        del record["weights"]["shapes"]
    if found.memory is not None:
        record["memory"]["total"] = found.memory.total
    return {"runs_here": found.runs_here, **record}


def as_text(found: Inspection) -> str:
    """What was found as people read it."""
    rows = [("model", found.model)]
    if found.architecture:
        layers = f", {found.num_layers} layers" if found.num_layers else ""
        rows.append(("architecture", found.architecture + layers))
    if found.num_parameters:
        active = found.num_active_parameters
        per_token = f", {_count(active)} for each token" if active != found.num_parameters else ""
        rows.append(("parameters", _count(found.num_parameters) + per_token))
    if found.weights is not None:
        stored, files = found.weights, "1 file" if found.weights.num_files == 1 else f"{found.weights.num_files} files"
        types = ", ".join(DTYPE_NAMES.get(name, name) for name in list(stored.dtypes)[:3])
        rows.append(("weights", f"{stored.format}, {types}, {format_bytes(stored.num_bytes)} in {files}"))
    if found.context_length:
        rows.append(("context", f"{found.context_length} tokens"))
    if found.settings:
        rows.append(("computed", _computed(found.settings)))
    if found.memory is not None:
        rows += _memory_rows(found.memory)
    rows.append(("runs here", _verdict(found)))
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


def _computed(settings: dict[str, Any]) -> str:
    parts = [f"in {settings['dtype']} on {settings['device']}"]
    if settings["attention_backend"] == "native_cpu":
        parts.append(f"native kernels, tier {settings['kernel_tier']}")
    if settings["quantization"] is not None:
        parts.append(f"weights in {settings['quantization']}")
    if settings["model_impl"] == "transformers":
        parts.append("by its class in transformers, which a start tries out first")
    return ", ".join(parts)


def _memory_rows(need: MemoryNeed) -> list[tuple[str, str]]:
    load = f"{need.num_requests} request{'s' if need.num_requests > 1 else ''} of {need.num_tokens} tokens"
    sizes = " + ".join(
        f"{format_bytes(size)} {what}"
        for size, what in (
            (need.weights, "weights"), (need.drafting_weights, "drafting model"), (need.workspace, "workspace"),
            (need.kv_cache, "KV cache"),
        )
        if size
    )  # fmt: skip
    token = f"; {format_bytes(need.kv_cache_token)} for each further token" if need.kv_cache_token else ""
    return [
        ("memory", f"{format_bytes(need.total)} for {load}: {sizes}{token}"),
        ("available", f"{format_bytes(need.available)}, of which the engine may take {format_bytes(need.usable)}"),
    ]


def _verdict(found: Inspection) -> str:
    if found.problems:
        lines = [f"no: {one.message}" + (f"\n{'':<13} hint: {one.hint}" if one.hint else "") for one in found.problems]
        return f"\n{'':<13} ".join(lines)
    assert found.memory is not None, "without a problem there is a plan"
    fitting = found.memory.fitting_requests
    if fitting >= found.memory.num_requests:
        return f"yes, up to {fitting} requests of {found.memory.num_tokens} tokens at once"
    return f"yes, but {fitting} of the {found.memory.num_requests} requests at once; the others wait"


def _count(number: int) -> str:
    """A number for people: "596.0 million"."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)
