"""Codes of 4 bits that stand for numbers of a table: NF4 (bitsandbytes) and MXFP4 (gpt-oss).

Used by `models.quantized_checkpoint`. No state.

Source: Dettmers et al. 2023 (QLoRA), section 3 and appendix E; Open Compute Project 2023 (Microscaling Formats v1.0),
sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from quire.config.hf_fields import FieldReader
from quire.errors import ModelError
from quire.kernels.reference.block_formats import NF4_VALUES
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.models.safetensors_file import TensorEntry
from quire.models.stored_layouts.module_tensors import (
    DAMAGED,
    Matrix,
    ModuleTensors,
    StoredLayout,
)

MAX_STATE_BYTES = 4096
MXFP4_GROUP = 32
_MXFP4_NAN = 255
_STORAGE_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Nf4State:
    """The numbers beside the tensors of a matrix.

    Attributes:
        shape: (output_size, input_size).
        block_size: numbers that share a scale, row after row.
        nested_size: scales that share a scale of their own; 0 = they are floats.
        nested_offset: added to those scales.
    """

    shape: tuple[int, int]
    block_size: int
    nested_size: int
    nested_offset: float


class Nf4Layout(StoredLayout):
    """bitsandbytes' 4 bits: two codes a byte, the first one in the upper half; scales may be quantized themselves."""

    ends = (
        ".weight.quant_state.bitsandbytes__nf4", ".weight", ".weight.absmax", ".weight.quant_map",
        ".weight.nested_absmax", ".weight.nested_quant_map",
    )  # fmt: skip

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """By its state."""
        state = self._state(tensors)
        size, table = math.prod(state.shape), (torch.float32,)
        weight = tensors.entry(".weight", _STORAGE_DTYPES)
        if math.prod(weight.shape) * weight.dtype.itemsize != -(-size // 2):
            raise tensors.error(".weight", f"has shape {list(weight.shape)}, for a matrix of {list(state.shape)}")
        tensors.entry(".weight.quant_map", table, (16,))
        blocks = -(-size // state.block_size)
        if state.nested_size:
            tensors.entry(".weight.absmax", (torch.uint8,), (blocks,))
            tensors.entry(".weight.nested_absmax", table, (-(-blocks // state.nested_size),))
            tensors.entry(".weight.nested_quant_map", table, (256,))
        else:
            tensors.entry(".weight.absmax", table, (blocks,))
        is_by_row = state.shape[1] % state.block_size == 0
        return Matrix(state.shape, WeightFormat("nf4", state.block_size) if is_by_row else None)

    def read(self, tensors: ModuleTensors) -> StoredWeight | torch.Tensor:
        """With scales as floats."""
        state = self._state(tensors)
        rows, inputs = state.shape
        table = tensors.finite(".weight.quant_map")
        if not torch.allclose(table, torch.tensor(NF4_VALUES), rtol=0.0, atol=1e-6):
            raise tensors.error(
                ".weight.quant_map", "is another table than NF4's", "save the model with quant_type nf4"
            )
        packed = tensors.tensor(".weight").flatten().view(torch.uint8)
        scales = self._scales(tensors, state)
        if inputs % state.block_size:
            codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: rows * inputs]
            wide = scales.repeat_interleave(state.block_size)[: rows * inputs]
            return (torch.tensor(NF4_VALUES)[codes.int()] * wide).view(rows, inputs)
        codes = (packed >> 4 | packed << 4).view(rows, inputs // 2)
        parts = {"codes": codes, "scales": scales.view(rows, inputs // state.block_size)}
        return StoredWeight(WeightFormat("nf4", state.block_size), state.shape, parts)

    @staticmethod
    def _scales(tensors: ModuleTensors, state: Nf4State) -> torch.Tensor:
        if not state.nested_size:
            return tensors.finite(".weight.absmax").clone()
        codes = tensors.tensor(".weight.absmax")
        outer = tensors.finite(".weight.nested_absmax").repeat_interleave(state.nested_size)[: len(codes)]
        return tensors.finite(".weight.nested_quant_map")[codes.int()] * outer + state.nested_offset

    def _state(self, tensors: ModuleTensors) -> Nf4State:
        """The JSON object in the first of its tensors."""
        end = self.ends[0]
        (num_bytes,) = tensors.entry(end, (torch.uint8,), (None,)).shape
        if num_bytes > MAX_STATE_BYTES:
            raise tensors.error(end, f"has {num_bytes} bytes, more than {MAX_STATE_BYTES}", DAMAGED)
        try:
            raw = json.loads(bytes(tensors.tensor(end).tolist()))
        except (ValueError, RecursionError) as cause:
            raise tensors.error(end, "is not a JSON object", DAMAGED) from cause
        if not isinstance(raw, dict):
            raise tensors.error(end, "is not a JSON object", DAMAGED)
        try:
            return _state_of(FieldReader(raw, tensors.module + end), has_nested=tensors.has(".weight.nested_absmax"))
        except ModelError as cause:
            raise tensors.error(end, f"is wrong: {cause.message}", cause.hint or DAMAGED) from cause


def _state_of(fields: FieldReader, *, has_nested: bool) -> Nf4State:
    shape = fields.integers("shape", 1, 1 << 24)
    if len(shape) != 2:
        raise fields.error("shape", f"is {list(shape)[:4]}", "only matrices are read")
    fields.text("quant_type", ("nf4",), "nf4")
    return Nf4State(
        shape=(shape[0], shape[1]),
        block_size=fields.integer("blocksize", 32, 4096),
        nested_size=fields.integer("nested_blocksize", 1, 1 << 20, 256) if has_nested else 0,
        nested_offset=fields.number("nested_offset", -1e6, 1e6, 0.0),
    )


class Mxfp4Layout(StoredLayout):
    """All experts' matrices in two tensors: two codes a byte, and the exponents of the groups."""

    ends = ("_blocks", "_scales")

    def marks(self, entry: TensorEntry) -> bool:
        """By the form of the blocks."""
        return entry.dtype == torch.uint8 and len(entry.shape) == 4

    def weight_name(self, module: str) -> str:
        """Without an end of its own."""
        return module

    def matrix(self, tensors: ModuleTensors) -> Matrix:
        """[num_experts, output_size, input_size]."""
        blocks = tensors.entry("_blocks", (torch.uint8,), (None, None, None, MXFP4_GROUP // 2)).shape
        tensors.entry("_scales", (torch.uint8,), blocks[:3])
        return Matrix((*blocks[:2], blocks[2] * MXFP4_GROUP), WeightFormat("MXFP4"))

    def read(self, tensors: ModuleTensors) -> StoredWeight:
        """The rows of all experts, as blocks in the order of GGUF: exponent, then the lower halves' 16 codes first."""
        codes, exponents = tensors.tensor("_blocks"), tensors.tensor("_scales")
        if bool((exponents == _MXFP4_NAN).any()):
            raise tensors.error("_scales", f"has exponents of {_MXFP4_NAN}, which mean NaN", DAMAGED)
        num_groups = codes.shape[2]
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).view(-1, num_groups, 2, MXFP4_GROUP // 2)
        ordered = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
        blocks = torch.cat([exponents.reshape(-1, num_groups, 1), ordered], dim=2).flatten(1)
        return StoredWeight(WeightFormat("MXFP4"), (blocks.shape[0], num_groups * MXFP4_GROUP), {"blocks": blocks})
