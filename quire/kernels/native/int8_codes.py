"""Codes of a checkpoint in eight bits into a packed int8 weight (`quant.INT8`), as they are. Called by layers."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native import quant
from quire.kernels.native.checks import check_size, check_tensor

_QUAD = 4
# In a packed weight codes have 128 added.
_SIGN = -128


def pack_codes(
    codes: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, packed_scales: torch.Tensor, first_row: int
) -> bool:
    """Write rows of codes as outputs first_row, first_row + 1, ... of a packed weight, in place.

    Args:
        codes: [num_rows, input_size] int8.
        scales: [num_rows] float32.
        packed, packed_scales: of `quant.INT8`; mutated for these outputs alone.

    Returns:
        Whether every scale is finite.

    Raises:
        ShapeError: a size or dtype differs from the above, or the rows lie outside `packed`.
    """
    check_tensor("codes", codes, (torch.int8,), (-1, -1), strided_rows=True)
    num_rows, input_size = codes.shape
    check_tensor("scales", scales, (torch.float32,), (num_rows,))
    panels = packed.shape[0]
    num_outputs = panels * quant.PANEL_SIZE
    check_tensor("packed", packed, (quant.PACKED_DTYPE,), quant.INT8.packed_shape(num_outputs, input_size))
    check_tensor("packed_scales", packed_scales, (torch.float32,), (num_outputs,))
    check_size("first_row", first_row)
    if first_row + num_rows > num_outputs:
        raise ShapeError(
            f"rows {first_row} .. {first_row + num_rows} do not fit into a packed weight of {num_outputs} outputs",
            field="first_row",
        )
    tiles, depth = packed.shape[1], packed.shape[2] * _QUAD
    rows = torch.arange(first_row, first_row + num_rows)
    padded = torch.zeros(num_rows, tiles * depth, dtype=torch.int8)
    padded[:, :input_size] = codes
    quads = padded.bitwise_xor_(torch.tensor(_SIGN, dtype=torch.int8)).view(torch.int32)
    # [panels, tiles, quads, outputs] of four codes each.
    places = packed.view(torch.int32)[..., 0]
    places[rows // quant.PANEL_SIZE, :, :, rows % quant.PANEL_SIZE] = quads.view(num_rows, tiles, -1)
    packed_scales[first_row : first_row + num_rows] = scales
    return bool(scales.isfinite().all())
