"""The tensors of a GGUF file as a checkpoint: blocks as they are stored, pointing into the file.

Opened by `loader`. Names are the file's own, which the model's GGUF family (`models.gguf`) asks for; tensors that hold
all experts of a layer are given in parts, `blk.0.ffn_up_exps.3.weight` for expert 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.errors import WeightsError
from quire.formats.gguf_file import GGUFFile
from quire.formats.gguf_header import GGUFTensor
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.models.checkpoint import Checkpoint, CheckpointEntry
from quire.models.gguf.family import GGUFFamily, num_layers_of
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.registry import architecture_of, gguf_family
from quire.models.gguf.rope import ROPE_TENSORS

PLAIN_TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STACKED = re.compile(r"(.*\.ffn_(?:gate|up|down)_exps)\.(weight|bias)")
# Gates and ups of all experts as one tensor.
STACKED_PAIR = re.compile(r"(.*\.ffn_)gate_up_exps\.weight")
# As the first mixtures were written: a tensor for each expert.
ONE_EXPERT = re.compile(r"(.*\.ffn_(?:gate|up|down))\.(\d+)\.weight")
MAX_PARTS = 8192
LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Change:
    """How the numbers of a tensor differ from those of Hugging Face's checkpoint.

    Attributes:
        shape: from the shape in the file to theirs.
        values: from the values in the file to theirs; None = the same.
    """

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    values: Callable[[torch.Tensor], torch.Tensor] | None = None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


CHANGES: Mapping[str, Change] = {
    "row": Change(lambda shape: (1, math.prod(shape))),
    "flat": Change(lambda shape: (math.prod(shape),)),
    "squeezed": Change(_without_ones),
    "channels": Change(lambda shape: (shape[0], 1, *shape[1:])),
    "log_decay": Change(_without_ones, lambda values: (-values.float()).log()),
}
"""By the names that families use in `changes`."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the numbers of an entry lie.

    Attributes:
        owner: name of the tensor in the file.
        keys: of latent attention: the tensor of keys, where `place` is that of values.
    """

    place: GGUFTensor
    owner: str
    change: Change | None = None
    keys: GGUFTensor | None = None


class GGUFCheckpoint(Checkpoint):
    """A file, or all parts of one.

    Raises:
        WeightsError: as `GGUFFile`.
        ModelError: the architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        architecture = architecture_of(self._file)
        family = gguf_family(architecture)
        num_layers = num_layers_of(Metadata(self._file, architecture))
        self._sources = dict(_sources(self._file, family, num_layers))
        self.entries = {name: self._entry(name, source) for name, source in self._sources.items()}

    def read(self, name: str) -> torch.Tensor | StoredWeight:
        """Points into the file."""
        source = self._sources[name]
        place, entry = source.place, self.entries[name]
        if source.keys is not None:
            return self._joined(source.keys, place).view(entry.shape)
        data = self._file.part_of(source.owner).data(place)
        raw = torch.frombuffer(data, dtype=torch.uint8)
        if entry.format is not None:
            *rows, input_size = place.shape
            blocks = raw.view(math.prod(rows), place.format.row_bytes(input_size))
            return StoredWeight(entry.format, (blocks.shape[0], input_size), {"blocks": blocks})
        dtype = PLAIN_TYPES[place.format.name]
        values = (raw if place.offset % dtype.itemsize == 0 else raw.clone()).view(dtype)
        if source.change is not None and source.change.values is not None:
            values = source.change.values(values)
        return values.view(entry.shape)

    def _joined(self, keys: GGUFTensor, values: GGUFTensor) -> torch.Tensor:
        """[head][elements of its keys, of its values][latent]: as one projection, float32."""
        parts = []
        for tensor in (keys, values):
            format_name, input_size = tensor.format.name, tensor.shape[-1]
            raw = torch.frombuffer(self._file.data(tensor.name), dtype=torch.uint8)
            blocks = {"blocks": raw.view(-1, tensor.format.row_bytes(input_size))}
            rows = StoredWeight(WeightFormat(format_name), (len(blocks["blocks"]), input_size), blocks)
            parts.append(rows.dequantize().view(tensor.shape))
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1)

    def release(self, name: str) -> None:
        """Of the file's map."""
        source = self._sources[name]
        self._file.part_of(source.owner).release(source.place)

    def _entry(self, name: str, source: _Source) -> CheckpointEntry:
        place, part = source.place, self._file.part_of(source.owner)
        if source.keys is not None:
            num_heads, value_size, latent_size = place.shape
            joined = (num_heads * (value_size + source.keys.shape[2]), latent_size)
            return CheckpointEntry(name, joined, torch.float32, None, place.num_bytes, part.path.name)
        dtype = PLAIN_TYPES.get(place.format.name)
        shape = place.shape if source.change is None else source.change.shape(place.shape)
        if dtype is None and source.change is not None:
            raise WeightsError(
                f"{part.path}: {name} is {place.format.name}", hint="it must be F32, F16 or BF16", field=name
            )
        stored_as = WeightFormat(place.format.name) if dtype is None else None
        return CheckpointEntry(name, shape, dtype, stored_as, place.num_bytes, part.path.name)


def _sources(file: GGUFFile, family: type[GGUFFamily], num_layers: int) -> Iterator[tuple[str, _Source]]:
    """Name of an entry, and where it lies; without layers that predict further tokens, and without rotary factors."""
    for name, tensor in file.tensors.items():
        layer = LAYER.match(name)
        if name in ROPE_TENSORS or (layer is not None and int(layer[1]) >= num_layers):
            continue
        stacked, pair, one = STACKED.fullmatch(name), STACKED_PAIR.fullmatch(name), ONE_EXPERT.fullmatch(name)
        if stacked is not None:
            for expert, place in enumerate(_parts(file, tensor, tensor.shape[:1])):
                yield f"{stacked[1]}.{expert}.{stacked[2]}", _Source(place, name)
        elif pair is not None:
            halved = _halved(file, tensor)
            halves = _parts(file, replace(tensor, shape=halved), halved[:2])
            for number, place in enumerate(halves):
                shard = "up" if number % 2 else "gate"
                yield f"{pair[1]}{shard}_exps.{number // 2}.weight", _Source(place, name)
        elif name.endswith(".attn_k_b.weight"):
            continue
        elif name.endswith(".attn_v_b.weight"):
            keys = _keys_of(file, tensor)
            yield name.replace("attn_v_b", "attn_kv_b"), _Source(tensor, name, keys=keys)
        elif one is not None:
            yield f"{one[1]}_exps.{one[2]}.weight", _Source(tensor, name)
        else:
            end = name if layer is None else name[layer.end() :]
            yield name, _Source(tensor, name, CHANGES.get(family.changes.get(end, "")))


def _parts(file: GGUFFile, tensor: GGUFTensor, counts: tuple[int, ...]) -> Iterator[GGUFTensor]:
    """What lies at each place of the first dimensions, whose sizes are `counts`."""
    count = math.prod(counts)
    if len(tensor.shape) <= len(counts) or count > MAX_PARTS:
        raise WeightsError(
            f"{file.path}: {tensor.name} has shape {list(tensor.shape)}",
            hint=f"experts are stacked in the first dimension, at most {MAX_PARTS // 2} of them", field=tensor.name,
        )  # fmt: skip
    num_bytes = tensor.num_bytes // count
    for number in range(count):
        yield replace(
            tensor, shape=tensor.shape[len(counts) :], offset=tensor.offset + number * num_bytes, num_bytes=num_bytes
        )


def _keys_of(file: GGUFFile, values: GGUFTensor) -> GGUFTensor:
    """What latents are projected to for keys, [head][latent][element], for the tensor of values of the same layer."""
    keys = file.tensors.get(values.name.replace("attn_v_b", "attn_k_b"))
    if (
        keys is None
        or len(values.shape) != 3
        or len(keys.shape) != 3
        or keys.shape[:2] != (values.shape[0], values.shape[2])
    ):
        raise WeightsError(
            f"{file.path}: {values.name} of shape {list(values.shape)} has no attn_k_b that belongs to it",
            hint="download the file again", field=values.name,
        )  # fmt: skip
    return keys


def _halved(file: GGUFFile, tensor: GGUFTensor) -> tuple[int, ...]:
    """The shape [num_experts, 2 * size, input_size] as [num_experts, 2, size, input_size]."""
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        raise WeightsError(
            f"{file.path}: {tensor.name} has shape {list(tensor.shape)}",
            hint="it must be experts, gates and ups, inputs", field=tensor.name,
        )  # fmt: skip
    num_experts, rows, input_size = tensor.shape
    return (num_experts, 2, rows // 2, input_size)
