"""Safetensors files of a model directory, and how the tensors of any checkpoint get into a model. No state.

Called by `loader`. Only safetensors files are read: other formats can run code when they are opened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.errors import WeightsError
from quire.formats.gguf_file import is_gguf, part_paths
from quire.layers.stored_weight import StoredWeight
from quire.layers.weight_target import WeightTarget
from quire.logger import get_logger
from quire.models.checkpoint import Checkpoint, CheckpointEntry
from quire.models.json_file import read_json_object
from quire.models.safetensors_file import SafetensorsFile, TensorEntry
from quire.models.safetensors_header import DOWNLOAD_AGAIN
from quire.utils.progress_line import ProgressLine

logger = get_logger(__name__)

MAX_INDEX_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
MODEL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Values that old checkpoints carry and models compute themselves.
COMPUTED_TENSORS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a directory.

    Raises:
        WeightsError: a malformed file or index, or no file.
    """

    def __init__(self, directory: Path) -> None:
        self._owners = open_safetensors(directory)
        self.entries = {name: _described(file, file.entries[name]) for name, file in self._owners.items()}

    def read(self, name: str) -> torch.Tensor:
        """Points into the file."""
        return self._owners[name].tensor(name)

    def release(self, name: str) -> None:
        """Of the file's map."""
        self._owners[name].release(name)


def open_safetensors(directory: Path) -> dict[str, SafetensorsFile]:
    """The tensors of a directory, each with the checked file that holds it.

    Raises:
        WeightsError: as `SafetensorsCheckpoint`.
    """
    expected_files, paths = find_weight_files(directory)
    owners = _owners(SafetensorsFile(path) for path in paths)
    _check_index(expected_files, owners)
    return owners


def load_weights(
    checkpoint: Checkpoint,
    origin: Path,
    targets: dict[str, WeightTarget],
    *,
    ignored: Collection[str] = (),
    prefixes: Sequence[str] = ("",),
    reports_error: bool = False,
) -> None:
    """Give every tensor of the checkpoint to its target, which converts the dtype.

    The names and shapes of all tensors are compared before any data is read.

    Args:
        origin: directory or file of the checkpoint, for messages.
        targets: checkpoint name -> where it goes.
        ignored: patterns of names that the checkpoint may have and the model does not need.
        prefixes: what names may begin with; those of `targets` begin with the first.
        reports_error: log the relative error of each tensor as stored.

    Raises:
        WeightsError: a missing or unexpected tensor, one of a wrong shape or dtype, or one with NaN or infinite values.
    """
    targets = _with_prefix(targets, prefixes, checkpoint.entries)
    used = {
        name
        for name in checkpoint.entries
        if name in targets or not (_is_ignored(name, ignored) or checkpoint.may_be_left_out(name))
    }
    _check_names(origin, used, targets)
    for name, target in targets.items():
        _check_tensor(checkpoint.entries[name], target)
    for name, target in targets.items():
        target.expect(checkpoint.entries[name].format)
    progress, num_bytes = ProgressLine("loading weights"), 0
    total = sum(checkpoint.entries[name].num_bytes for name in targets)
    try:
        for name, target in targets.items():
            progress.show(num_bytes, total)
            tensor = checkpoint.read(name)
            is_finite = target.load(tensor) if isinstance(tensor, torch.Tensor) else target.load_stored(tensor)
            if not is_finite:
                raise _not_finite(checkpoint, name)
            if reports_error:
                _report_error(name, tensor, target)
            checkpoint.release(name)
            num_bytes += checkpoint.entries[name].num_bytes
    finally:
        progress.end()


def _report_error(name: str, tensor: torch.Tensor | StoredWeight, target: WeightTarget) -> None:
    given = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize().view(target.shape)
    if given.is_floating_point():  # stored integers are parts of numbers
        logger.info("%s: relative error %.5f as stored", name, relative_error(given, target.stored()))


def relative_error(given: torch.Tensor, stored: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `given`; 0 for zeros."""
    wide = given.float()
    norm = float(wide.norm())
    return float((stored.float() - wide).norm()) / norm if norm else 0.0


def find_weight_files(directory: Path) -> tuple[dict[str, Path], list[Path]]:
    """Tensor name -> file as the index says (empty without an index), and the files to read; of a GGUF file, its parts.

    Raises:
        WeightsError: no safetensors file, or an index that is malformed or names files that are not there.
    """
    if is_gguf(directory):
        return {}, part_paths(directory)
    index_path = directory / INDEX_NAME
    if index_path.exists():
        expected_files = _read_index(index_path)
        return expected_files, sorted(set(expected_files.values()))
    single = directory / "model.safetensors"
    if single.exists():
        return {}, [single]
    paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:
        raise _no_weights(directory)
    return {}, paths


def _read_index(index_path: Path) -> dict[str, Path]:
    weight_map = read_json_object(index_path, MAX_INDEX_BYTES, WeightsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index_path} has no weight_map", hint=DOWNLOAD_AGAIN, field=INDEX_NAME)
    files: dict[str, Path] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name not in files:
            files[name] = _shard_path(index_path, tensor, name)
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _shard_path(index_path: Path, tensor: str, name: Any) -> Path:
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.\-]*\.safetensors", name):
        raise WeightsError(
            f"{index_path} puts tensor {tensor[:200]!r} in {str(name)[:200]!r}",
            hint="it must be the plain name of a .safetensors file in the same directory",
            field="weight_map",
        )
    path = index_path.parent / name
    if not path.exists():
        raise WeightsError(f"{index_path} names {name}, which is missing", hint="download that file too", field=name)
    return path


def _no_weights(directory: Path) -> WeightsError:
    refused = sorted(path.name for path in directory.iterdir() if path.suffix in REFUSED_SUFFIXES)
    if not refused:
        return WeightsError(f"{directory} has no .safetensors file", hint="download the weights too", field="weights")
    return WeightsError(
        f"{directory} has no .safetensors file, only {', '.join(refused[:3])}, which Quire does not open",
        hint="convert it where you trust it: transformers' model.save_pretrained(directory) writes safetensors",
        field=refused[0],
    )


def _owners(files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it."""
    owners: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in owners:
                raise WeightsError(
                    f"tensor {name[:200]!r} is in {owners[name].path.name} and in {file.path.name}",
                    hint="remove one of the files, or add the index that belongs to them",
                    field=name,
                )
            owners[name] = file
    return owners


def _check_index(expected_files: dict[str, Path], owners: dict[str, SafetensorsFile]) -> None:
    for name, path in expected_files.items():
        if name not in owners or owners[name].path != path:
            raise WeightsError(
                f"{INDEX_NAME} says that tensor {name[:200]!r} is in {path.name}, but it is not",
                hint="index and files belong to different versions: download them again",
                field=name,
            )


def _is_ignored(name: str, ignored: Collection[str]) -> bool:
    return COMPUTED_TENSORS.search(name) is not None or any(re.search(pattern, name) for pattern in ignored)


def _with_prefix(
    targets: dict[str, WeightTarget], prefixes: Sequence[str], found: Collection[str]
) -> dict[str, WeightTarget]:
    """The targets under the names of the first prefix that all of those with the usual one are found with.

    Where a tensor is found in parts, its target is replaced by theirs.
    """
    usual, names = prefixes[0], set(found)
    for prefix in prefixes:
        renamed = {
            prefix + name[len(usual) :] if name.startswith(usual) else name: target for name, target in targets.items()
        }
        as_stored: dict[str, WeightTarget] = {}
        for name, target in renamed.items():
            parts = {} if name in names else target.in_parts(name)
            as_stored.update(parts if parts and parts.keys() <= names else {name: target})
        if as_stored.keys() <= names:
            return as_stored
    return targets


def _check_names(directory: Path, found: Collection[str], targets: Collection[str]) -> None:
    missing, unexpected = set(targets) - set(found), set(found) - set(targets)
    if missing:
        raise WeightsError(
            f"{directory} lacks {_some(missing)} required by config.json",
            hint=f"config.json and the weights do not belong together (unexpected: {_some(unexpected)})"
            if unexpected
            else "download all files of the checkpoint",
            field=min(missing),
        )
    if unexpected:
        raise WeightsError(
            f"{directory} has {_some(unexpected)} that the architecture in config.json does not have",
            hint="config.json and the weights do not belong together; check its architecture and its sizes",
            field=min(unexpected),
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(name[:200] for name in sorted(names)[:5])
    return f"{len(names)} tensors: {shown}{', ...' if len(names) > 5 else ''}"


def _not_finite(checkpoint: Checkpoint, name: str) -> WeightsError:
    tensor = checkpoint.read(name)
    values = tensor.float() if isinstance(tensor, torch.Tensor) else tensor.dequantize()
    count = int((~values.isfinite()).sum())
    problem = f"has {count} values that are NaN or infinite" if count else "has values too large for the model's dtype"
    return WeightsError(
        f"{checkpoint.entries[name].file}: tensor {name} {problem}",
        hint="the checkpoint is damaged: download it again" if count else "use dtype bfloat16 or float32",
        field=name,
    )


def _described(file: SafetensorsFile, entry: TensorEntry) -> CheckpointEntry:
    return CheckpointEntry(entry.name, entry.shape, entry.dtype, None, entry.end - entry.begin, file.path.name)


def _check_tensor(entry: CheckpointEntry, target: WeightTarget) -> None:
    if entry.shape != target.shape:
        raise WeightsError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, config.json gives {list(target.shape)}",
            hint="config.json and the weights do not belong together",
            field=entry.name,
        )
    if entry.format is None and entry.dtype not in MODEL_DTYPES:
        raise WeightsError(
            f"{entry.file}: tensor {entry.name} is {entry.dtype}, a quantized or integer type",
            hint="use the model's unquantized checkpoint (float16, bfloat16 or float32)",
            field=entry.name,
        )
