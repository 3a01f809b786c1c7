"""QuantizedCheckpoint: the safetensors files of a quantized model, read as matrices under the names of plain ones.

Made by `loader` for models whose `ModelArch` has a quantization; called by `weights`. Owns the checked files. The
tensors of a quantized module are checked against each other before any data is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from quire.config.quantized_checkpoint import CheckpointQuantization, WeightScheme
from quire.layers.stored_weight import StoredWeight
from quire.models.checkpoint import Checkpoint, CheckpointEntry
from quire.models.safetensors_file import SafetensorsFile
from quire.models.stored_layouts.codebooks import Mxfp4Layout, Nf4Layout
from quire.models.stored_layouts.integers import AwqLayout, GptqLayout, PackQuantizedLayout
from quire.models.stored_layouts.module_tensors import Matrix, ModuleTensors, StoredLayout
from quire.models.stored_layouts.plain import BlockLayout, Int8RowsLayout, PlainLayout

LAYOUTS: Mapping[str, type[StoredLayout]] = {
    "gptq": GptqLayout, "gptq_v2": GptqLayout, "awq": AwqLayout, "pack-quantized": PackQuantizedLayout,
    "plain": PlainLayout, "blocks": BlockLayout, "nf4": Nf4Layout, "int8_rows": Int8RowsLayout, "mxfp4": Mxfp4Layout,
}  # fmt: skip
# Scales of activations and of the KV cache: Quire measures those itself.
SPARE_TENSORS = re.compile(
    r"\.(input|output|q|k|v|prob|kv)_(scale|zero_point)$|\.(input|weight)_scale_ub$|\.input_global_scale$"
)


class QuantizedCheckpoint(Checkpoint):
    """What the files hold.

    Args:
        files: tensor name -> the checked file that has it.
        quantization: what config.json says.

    Raises:
        WeightsError: a tensor of a quantized module is missing, or has a shape or dtype that does not fit.
    """

    def __init__(self, files: Mapping[str, SafetensorsFile], quantization: CheckpointQuantization) -> None:
        self._files = files
        self._modules: dict[str, tuple[StoredLayout, ModuleTensors]] = {}
        entries: dict[str, CheckpointEntry] = {}
        parts: set[str] = set()
        for layout in _layouts(quantization.schemes):
            for tensors in _modules_of(layout, files):
                name = layout.weight_name(tensors.module)
                self._modules[name] = (layout, tensors)
                entries[name] = _entry_of(name, layout.matrix(tensors), tensors)
                parts.update(tensors.module + end for end in tensors.files)
        for name, file in files.items():
            if name not in parts and not SPARE_TENSORS.search(name):
                entry, size = file.entries[name], file.entries[name].end - file.entries[name].begin
                entries[name] = CheckpointEntry(name, entry.shape, entry.dtype, None, size, file.path.name)
        self.entries = entries

    @property
    def is_quantized(self) -> bool:
        """Whatever it holds: its config.json says so."""
        return True

    def may_be_left_out(self, name: str) -> bool:
        """Biases of zeros, which old writers of GPTQ give to every module."""
        module, _, end = name.rpartition(".")
        return end == "bias" and f"{module}.weight" in self._modules and not bool(self._files[name].tensor(name).any())

    def read(self, name: str) -> torch.Tensor | StoredWeight:
        """An entry's weight as stored, or its numbers.

        Raises:
            WeightsError: scales that are NaN or infinite, or indices that are out of range.
        """
        if name not in self._modules:
            return self._files[name].tensor(name)
        layout, tensors = self._modules[name]
        return layout.read(tensors)

    def release(self, name: str) -> None:
        """Of all the tensors of a module."""
        if name in self._modules:
            self._modules[name][1].release()
        else:
            self._files[name].release(name)


def _layouts(schemes: Sequence[WeightScheme]) -> list[StoredLayout]:
    """One for each kind of packing that the schemes have."""
    by_type: dict[type[StoredLayout], list[WeightScheme]] = {}
    for scheme in schemes:
        by_type.setdefault(LAYOUTS[scheme.packing], []).append(scheme)
    return [layout(own) for layout, own in by_type.items()]


def _modules_of(layout: StoredLayout, files: Mapping[str, SafetensorsFile]) -> Iterator[ModuleTensors]:
    """The modules whose weights are stored so."""
    mark = layout.ends[0]
    for name, file in files.items():
        if name.endswith(mark) and layout.marks(file.entries[name]):
            module = name[: -len(mark)]
            yield ModuleTensors(module, {end: files[module + end] for end in layout.ends if module + end in files})


def _entry_of(name: str, matrix: Matrix, tensors: ModuleTensors) -> CheckpointEntry:
    entries = [file.entries[tensors.module + end] for end, file in tensors.files.items()]
    num_bytes = sum(entry.end - entry.begin for entry in entries)
    dtype = torch.float32 if matrix.format is None else None
    file_name = next(iter(tensors.files.values())).path.name
    return CheckpointEntry(name, matrix.shape, dtype, matrix.format, num_bytes, file_name)
