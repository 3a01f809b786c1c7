"""StoredWeight: rows of a matrix as a quantized checkpoint holds them. Made by checkpoint readers, taken by targets.

No state. What the formats mean is in `formats.block_formats` (GGUF) and `kernels.reference.block_formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from quire.kernels.reference import block_formats


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the rows of a matrix are stored; formats are equal where one kernel can take the rows of both.

    Attributes:
        name: of a GGUF type, such as "Q4_K", or "int4" (codes with zero points), "int8", "fp8", "nf4", "mxfp4".
        group_size: inputs that share a scale, where the name does not tell; 0 = all.
        is_reordered: the columns of each weight are in an order of its own (`StoredWeight.input_order`).
    """

    name: str
    group_size: int = 0
    is_reordered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """Rows of a matrix, or of several stacked ones.

    Attributes:
        shape: (num_rows, input_size); of stacked matrices, the rows of all.
        parts: tensors of num_rows rows each. GGUF: blocks [num_rows, row_bytes] uint8. int4: codes
            [num_rows, input_size / 2] uint8, whose low halves are the even columns, scales [num_rows, num_groups] and
            zeros [num_rows, num_groups] uint8; a number is (code - zero) * scale. int8: codes [num_rows, input_size]
            int8 and scales. fp8: the same in float8_e4m3fn. nf4: codes as int4's, and scales.
        input_order: [input_size] int64: column i is multiplied by input input_order[i]; None = in order.
    """

    format: WeightFormat
    shape: tuple[int, int]
    parts: Mapping[str, torch.Tensor]
    input_order: torch.Tensor | None = None

    def rows(self, index: slice | torch.Tensor) -> StoredWeight:
        """Some of the rows: a range, or [n] int64 numbers of rows."""
        parts = {name: part[index] for name, part in self.parts.items()}
        num_rows = next(iter(parts.values())).shape[0]
        return replace(self, shape=(num_rows, self.shape[1]), parts=parts)

    def dequantize(self) -> torch.Tensor:
        """The numbers that are meant, columns in the order of the inputs: float32 [num_rows, input_size]."""
        values = block_formats.dequantize(self.format.name, self.parts, self.format.group_size, self.shape[1])
        if self.input_order is None:
            return values
        in_order = torch.empty_like(values)
        in_order[:, self.input_order] = values
        return in_order
