"""One number in each element of `weight`: 8-bit integers and floats, with scales of rows, groups or blocks.

compressed-tensors (int-quantized, naive-quantized, float-quantized), FP8 as DeepSeek and Qwen publish it and as vLLM
and fbgemm write it, and bitsandbytes' LLM.int8(). Used by `models.quantized_checkpoint`. No state.

Source: Micikevicius et al. 2022 (FP8 formats for deep learning); Liu et al. 2024 (DeepSeek-V3), section 3.3; Dettmers
et al. 2022 (LLM.int8()).
"""

from __future__ import annotations

import torch

from quire.config.quantized_checkpoint import WeightScheme
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.models.safetensors_file import TensorEntry
from quire.models.stored_layouts.integers import dequantized
from quire.models.stored_layouts.module_tensors import (
    DAMAGED,
    SCALE_DTYPES,
    Matrix,
    ModuleTensors,
    StoredLayout,
    num_groups,
)

_DTYPES = {"int": torch.int8, "fp8": torch.float8_e4m3fn}


class PlainLayout(StoredLayout):
    """A scale for the matrix, for each row, or for each group of a row's inputs."""

    ends = (".weight", ".weight_scale", ".weight_zero_point")

    def marks(self, entry: TensorEntry) -> bool:
        """By the dtype: other modules' weights are ordinary floats."""
        return any(entry.dtype == _DTYPES[scheme.kind] for scheme in self.schemes)

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """By the shapes of its tensors."""
        scheme, shape = self._scheme_of(tensors)
        if tensors.has(".weight_zero_point") and not scheme.is_symmetric:
            return Matrix(shape, None)
        return Matrix(shape, WeightFormat("int8" if scheme.kind == "int" else "fp8", scheme.group_size))

    def read(self, tensors: ModuleTensors) -> StoredWeight | torch.Tensor:
        """With a scale for every row and group."""
        scheme, shape = self._scheme_of(tensors)
        groups = num_groups(shape[1], scheme.group_size)
        scales = _by_row(tensors.finite(".weight_scale").float(), shape[0], groups)
        codes = tensors.tensor(".weight")
        if scheme.kind == "fp8":
            return StoredWeight(WeightFormat("fp8"), shape, {"codes": codes, "scales": scales})
        if tensors.has(".weight_zero_point"):
            zeros = _by_row(tensors.tensor(".weight_zero_point"), shape[0], groups)
            if not scheme.is_symmetric:
                return dequantized(codes, zeros, scales, scheme.group_size)
            if bool((zeros != 0).any()):
                raise tensors.error(
                    ".weight_zero_point", "is not zero, though weights are said to be symmetric", DAMAGED
                )
        return StoredWeight(WeightFormat("int8", scheme.group_size), shape, {"codes": codes, "scales": scales})

    def _scheme_of(self, tensors: ModuleTensors) -> tuple[WeightScheme, tuple[int, int]]:
        weight = tensors.entry(".weight", tuple(_DTYPES.values()), (None, None))
        rows, inputs = weight.shape
        scale = tensors.entry(".weight_scale", SCALE_DTYPES)
        for scheme in self.schemes:
            groups = num_groups(inputs, scheme.group_size)
            if _DTYPES[scheme.kind] == weight.dtype and _is_by_row(scale.shape, rows, groups):
                if tensors.has(".weight_zero_point"):
                    zeros = tensors.entry(".weight_zero_point", (torch.int8,))
                    if not _is_by_row(zeros.shape, rows, groups):
                        raise tensors.error(".weight_zero_point", f"has shape {list(zeros.shape)}, with {rows} rows")
                elif not scheme.is_symmetric:
                    continue
                return scheme, (rows, inputs)
        raise tensors.error(
            ".weight_scale",
            f"has shape {list(scale.shape)} for weights of {[rows, inputs]}: config.json says otherwise",
        )


def _is_by_row(shape: tuple[int, ...], num_rows: int, groups: int) -> bool:
    """Whether scales of such a shape are one number, or one for each row and group."""
    if groups == 1 and shape in ((), (1,), (1, 1), (num_rows,)):
        return True
    return shape == (num_rows, groups)


def _by_row(values: torch.Tensor, num_rows: int, groups: int) -> torch.Tensor:
    """[num_rows, groups] of one number, or of one for each row and group."""
    if values.numel() == 1:
        values = values.flatten().expand(num_rows)
    return values.reshape(num_rows, groups).contiguous()


class BlockLayout(StoredLayout):
    """FP8 with a scale for each block of rows and inputs."""

    ends = (".weight", ".weight_scale_inv", ".weight_scale")

    def marks(self, entry: TensorEntry) -> bool:
        """By the dtype."""
        return entry.dtype == torch.float8_e4m3fn

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """By the shapes of its tensors."""
        (scheme,) = self.schemes
        rows, inputs = tensors.entry(".weight", (torch.float8_e4m3fn,), (None, None)).shape
        blocks = (-(-rows // scheme.block_rows), -(-inputs // scheme.group_size))
        tensors.entry(self._scale_end(tensors), SCALE_DTYPES, blocks)
        return Matrix((rows, inputs), WeightFormat("fp8", scheme.group_size))

    def read(self, tensors: ModuleTensors) -> StoredWeight:
        """With a block's scale for each of its rows."""
        (scheme,) = self.schemes
        codes = tensors.tensor(".weight")
        scales = tensors.finite(self._scale_end(tensors)).float()
        by_row = scales.repeat_interleave(scheme.block_rows, dim=0)[: codes.shape[0]].contiguous()
        shape = (codes.shape[0], codes.shape[1])
        return StoredWeight(WeightFormat("fp8", scheme.group_size), shape, {"codes": codes, "scales": by_row})

    @staticmethod
    def _scale_end(tensors: ModuleTensors) -> str:
        return ".weight_scale" if tensors.has(".weight_scale") else ".weight_scale_inv"


class Int8RowsLayout(StoredLayout):
    """bitsandbytes: integers of 8 bits; `SCB` has the largest magnitude of each row, which is 127."""

    ends = (".weight", ".SCB", ".weight_format")

    def marks(self, entry: TensorEntry) -> bool:
        """By the dtype."""
        return entry.dtype == torch.int8

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """By the shapes of its tensors."""
        rows, inputs = tensors.entry(".weight", (torch.int8,), (None, None)).shape
        tensors.entry(".SCB", SCALE_DTYPES, (rows,))
        if tensors.has(".weight_format"):
            tensors.entry(".weight_format", (torch.uint8,))
        return Matrix((rows, inputs), WeightFormat("int8"))

    def read(self, tensors: ModuleTensors) -> StoredWeight:
        """With scales in place of the largest magnitudes."""
        if tensors.has(".weight_format") and int(tensors.tensor(".weight_format").sum()):
            raise tensors.error(".weight_format", "is not row-major", "save the model with a newer bitsandbytes")
        codes = tensors.tensor(".weight")
        scales = (tensors.finite(".SCB").float() / 127.0)[:, None]
        return StoredWeight(WeightFormat("int8"), (codes.shape[0], codes.shape[1]), {"codes": codes, "scales": scales})
