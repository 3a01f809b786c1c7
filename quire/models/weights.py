"""Safetensors files of a model directory, and how the tensors of any checkpoint get into a model. No state.

Called by `loader`. Only safetensors files are read: other formats can run code when they are opened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from quire.errors import WeightsError
from quire.layers.stored_weight import StoredWeight
from quire.layers.weight_target import WeightTarget
from quire.logger import get_logger
from quire.models.checkpoint import Checkpoint, CheckpointEntry
from quire.models.safetensors_file import SafetensorsFile, TensorEntry
from quire.models.weight_files import check_index, find_weight_files, owners
from quire.utils.progress_line import ProgressLine

logger = get_logger(__name__)

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
    files = owners(SafetensorsFile(path) for path in paths)
    check_index(expected_files, {name: file.path for name, file in files.items()})
    return files


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
