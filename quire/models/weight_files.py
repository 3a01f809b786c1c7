"""Which safetensors files of a directory are read, and which of them holds a tensor. Loads no torch. No state.

Called by `weights` and the memory planner, for a start, and for `quire inspect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quire.config.engine import QuireConfig
from quire.core.memory_budget import WEIGHT_BYTES
from quire.errors import WeightsError
from quire.formats.gguf_file import is_gguf, part_paths
from quire.models.json_file import read_json_object, regular_file_size
from quire.models.safetensors_header import DOWNLOAD_AGAIN

MAX_INDEX_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


class WeightFile(Protocol):
    """A file with tensors."""

    path: Path

    @property
    def entries(self) -> Mapping[str, Any]:
        """By the names of tensors."""


AnyFile = TypeVar("AnyFile", bound=WeightFile)


def kept_bytes(config: QuireConfig) -> int | None:
    """Bytes of the weight files of a model whose matrices stay in the formats of these files; None = they do not.

    Args:
        config: resolved.

    Raises:
        WeightsError: as `find_weight_files`.
    """
    arch = config.arch
    is_native = config.device.attention_backend == "native_cpu" and config.model.dtype == "bfloat16"
    is_stored = arch is not None and (arch.gguf_architecture != "" or arch.quantization is not None)
    if not is_stored or not is_native or config.load.load_format == "dummy":
        return None
    if config.model.quantization in WEIGHT_BYTES:
        return None  # they are quantized anew
    return sum(regular_file_size(path, WeightsError) for path in find_weight_files(Path(config.model_path))[1])


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


def owners(files: Iterable[AnyFile]) -> dict[str, AnyFile]:
    """Tensor name -> the file that holds it."""
    found: dict[str, AnyFile] = {}
    for file in files:
        for name in file.entries:
            if name in found:
                raise WeightsError(
                    f"tensor {name[:200]!r} is in {found[name].path.name} and in {file.path.name}",
                    hint="remove one of the files, or add the index that belongs to them",
                    field=name,
                )
            found[name] = file
    return found


def check_index(expected_files: Mapping[str, Path], found: Mapping[str, Path]) -> None:
    """Raises WeightsError unless each tensor is `found` in the file that the index says."""
    for name, path in expected_files.items():
        if found.get(name) != path:
            raise WeightsError(
                f"{INDEX_NAME} says that tensor {name[:200]!r} is in {path.name}, but it is not",
                hint="index and files belong to different versions: download them again",
                field=name,
            )
