"""The types of tensors in GGUF files: how many numbers share a block, and how many bytes it has. Constants, no state.

Called by the reader of GGUF files, which checks sizes with it, and by the kernels, which pack and unpack the blocks.

Source: ggml.h (`enum ggml_type`) and ggml-common.h (block structs), GGUF specification version 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One type of tensor.

    Attributes:
        name: as ggml and GGUF tools write it, such as "Q4_K".
        number: by which a file names it (ggml type).
        block_size: consecutive numbers of a row that share a block.
        block_bytes: of a block.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int

    def row_bytes(self, input_size: int) -> int:
        """Bytes of a row of `input_size` numbers.

        Raises:
            ValueError: it does not consist of whole blocks.
        """
        if input_size % self.block_size:
            raise ValueError(f"a row of {input_size} numbers is not a multiple of the {self.block_size} of {self.name}")
        return input_size // self.block_size * self.block_bytes


_FORMATS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q3_K", 11, 256, 110),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("IQ4_XS", 23, 256, 136),
    BlockFormat("MXFP4", 39, 32, 17),
)

BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType({one.name: one for one in _FORMATS})
"""Every type that Quire reads, by name."""

BLOCK_FORMATS_BY_NUMBER: Mapping[int, BlockFormat] = MappingProxyType({one.number: one for one in _FORMATS})
"""The same by number."""

OTHER_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K",
        16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
        24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
        31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
        36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
    }
)  # fmt: skip
"""Names of the types that Quire does not read, by number: for messages."""


def type_name(number: int) -> str:
    """What the type `number` is called, whether Quire reads it or not."""
    known = BLOCK_FORMATS_BY_NUMBER.get(number)
    return known.name if known else OTHER_TYPES.get(number, f"unknown type {number}")
