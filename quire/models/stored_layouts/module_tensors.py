"""ModuleTensors: the tensors of one module of a quantized checkpoint, checked by their headers before data is read.

Made by `quantized_checkpoint`, read by the layouts beside this file. Owns nothing but references to files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.config.quantized_checkpoint import WeightScheme
from quire.errors import WeightsError
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.models.safetensors_file import SafetensorsFile, TensorEntry

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MISMATCH = "config.json and the weights do not belong together, or the checkpoint is damaged: download it again"
DAMAGED = "the checkpoint is damaged: download it again"


@dataclass(frozen=True)
class Matrix:
    """A module's weight, as its headers describe it.

    Attributes:
        shape: (output_size, input_size), behind the number of experts where one tensor has all of them.
        format: as it is stored; None = in a way that no kernel takes, so that it is read as plain numbers.
    """

    shape: tuple[int, ...]
    format: WeightFormat | None


class ModuleTensors:
    """What a module has.

    Args:
        module: its name.
        files: end of a tensor's name, such as ".qweight" -> the file that holds it.
    """

    def __init__(self, module: str, files: Mapping[str, SafetensorsFile]) -> None:
        self.module = module
        self.files = files

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return end in self.files

    def entry(self, end: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None] | None = None) -> TensorEntry:
        """The header of a tensor; a size of None is any.

        Raises:
            WeightsError: it is missing, or has another dtype or shape.
        """
        file = self.files.get(end)
        if file is None:
            raise WeightsError(
                f"{self._file_name()}: {self.module} lacks {end[1:]}, which its quantization needs",
                hint=MISMATCH, field=self.module + end,
            )  # fmt: skip
        entry = file.entries[self.module + end]
        if entry.dtype not in dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(end, f"is {str(entry.dtype).removeprefix('torch.')}, expected {known}")
        if shape is not None and not _fits(entry.shape, shape):
            expected = [size if size is not None else "any" for size in shape]
            raise self.error(end, f"has shape {list(entry.shape)}, expected {expected}")
        return entry

    def tensor(self, end: str) -> torch.Tensor:
        """A tensor whose header was checked, pointing into its file."""
        return self.files[end].tensor(self.module + end)

    def finite(self, end: str) -> torch.Tensor:
        """Likewise, of floats.

        Raises:
            WeightsError: some are NaN or infinite.
        """
        tensor = self.tensor(end)
        if not bool(tensor.isfinite().all()):
            raise self.error(end, "has values that are NaN or infinite", DAMAGED)
        return tensor

    def release(self) -> None:
        """Give their memory back; who reads them again, reads the files again."""
        for end, file in self.files.items():
            file.release(self.module + end)

    def error(self, end: str, problem: str, hint: str = MISMATCH) -> WeightsError:
        """An error about one of them."""
        name = self.module + end
        return WeightsError(f"{self.files[end].path.name}: tensor {name[:200]} {problem}", hint=hint, field=name)

    def _file_name(self) -> str:
        return next(iter(self.files.values())).path.name


class StoredLayout(ABC):
    """One way of spreading a matrix over tensors.

    Attributes:
        ends: of the names of its tensors; the first one is there in every module that is stored so.
    """

    ends: ClassVar[tuple[str, ...]]

    def __init__(self, schemes: Sequence[WeightScheme]) -> None:
        self.schemes = schemes

    def marks(self, entry: TensorEntry) -> bool:
        """Whether a tensor whose name has the first end belongs to a module that is stored so."""
        return True

    def weight_name(self, module: str) -> str:
        """The name that the module's weight has in unquantized checkpoints."""
        return f"{module}.weight"

    @abstractmethod
    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """What the module holds, by the headers of its tensors.

        Raises:
            WeightsError: a tensor is missing, or its dtype or shape does not fit.
        """

    @abstractmethod
    def read(self, tensors: ModuleTensors) -> StoredWeight | torch.Tensor:
        """The weight: stored, or as numbers where the format of `matrix` is None.

        Raises:
            WeightsError: values that are out of range, NaN or infinite.
        """


def num_groups(input_size: int, group_size: int) -> int:
    """Groups of a row; a group size of 0 means one."""
    return -(-input_size // group_size) if group_size else 1


def _fits(shape: tuple[int, ...], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, expected, strict=True)
    )
