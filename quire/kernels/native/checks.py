"""The boundary of the C++ library: what a tensor must be before its address crosses. Called by every wrapper."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import ShapeError

# Numbers of `DType` in csrc/include/quire/types.h.
DTYPE_CODES = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.int32: 3}


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int], *, strided_rows: bool = False
) -> None:
    """Refuse a tensor that a kernel would misread.

    Args:
        dtypes: the allowed ones.
        shape: the size of each dimension; -1 = any.
        strided_rows: allow any distance between rows of a matrix; otherwise memory is contiguous.

    Raises:
        ShapeError: names the tensor, what it is and what was expected.
    """
    is_shaped = tensor.dim() == len(shape) and all(
        size in (-1, given) for size, given in zip(shape, tensor.shape, strict=False)
    )
    if not is_shaped:
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ShapeError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]", field=name)
    if tensor.dtype not in dtypes:
        raise ShapeError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}", field=name)
    if tensor.device.type != "cpu":
        raise ShapeError(f"{name} is on {tensor.device}, expected cpu", field=name)
    if strided_rows:
        is_laid_out = tensor.stride(-1) == 1 and (tensor.shape[0] <= 1 or tensor.stride(0) >= tensor.shape[-1])
    else:
        is_laid_out = tensor.is_contiguous()
    if not is_laid_out and tensor.numel():
        raise ShapeError(f"{name} has strides {tensor.stride()}, expected contiguous memory", field=name)
