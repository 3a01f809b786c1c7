"""The boundary of the C++ library: what a tensor must be before its address crosses. Called by every wrapper."""

from __future__ import annotations

import numpy as np
import torch

from quire.errors import ShapeError

# What weights in the model's type and activations may be.
FLOATS = (torch.bfloat16, torch.float32)
# More elements than a machine holds: sizes up to here cannot overflow a product with the size of an element.
MAX_SIZE = 1 << 40
# Numbers of `DType` in csrc/include/quire/types.h.
DTYPE_CODES = {
    torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.int32: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5,
}  # fmt: skip


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuse anything but rows of activations: [any, any] of `FLOATS`, rows any distance apart.

    Raises:
        ShapeError: as `check_tensor`.
    """
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.dtype in FLOATS and _is_plain(tensor):
        return
    check_tensor(name, tensor, FLOATS, (-1, -1), strided_rows=True)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    *,
    strided_rows: bool = False,
) -> None:
    """Refuse a tensor that a kernel would misread.

    Args:
        dtypes: the allowed ones.
        shape: the size of each dimension; -1 = any.
        strided_rows: allow any distance between rows of a matrix; otherwise memory is contiguous.

    Raises:
        ShapeError: names the tensor, what it is and what was expected.
    """
    # The usual case first: all of it would take longer than a short kernel.
    if isinstance(tensor, torch.Tensor) and tensor.shape == shape and tensor.dtype in dtypes and _is_plain(tensor):
        return
    check_is_tensor(name, tensor)
    given = tensor.shape
    is_shaped = len(given) == len(shape) and all(map(_fits, shape, given))
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
    if tensor.data_ptr() % tensor.itemsize:
        raise ShapeError(f"{name} has an address that is not a multiple of {tensor.itemsize}", field=name)


def _fits(wanted: int, size: int) -> bool:
    return wanted in (-1, size)


def check_is_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor, and one without plain memory."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{name} is {type(value).__name__}, expected a tensor", field=name)
    if value.layout is not torch.strided:
        raise ShapeError(f"{name} is {value.layout}, expected torch.strided", field=name)


def check_size(name: str, size: int, minimum: int = 0, maximum: int = MAX_SIZE) -> None:
    """Refuse what is no whole number of that range.

    Raises:
        ShapeError: names the size, what it is and what was expected.
    """
    if not isinstance(size, int) or not minimum <= size <= maximum:
        raise ShapeError(f"{name} is {size!r}, expected a whole number from {minimum} to {maximum}", field=name)


def check_number(name: str, number: float) -> None:
    """Refuse what is no number."""
    if not isinstance(number, (float, int)):
        raise ShapeError(f"{name} is {number!r}, expected a number", field=name)


def check_apart(name: str, written: torch.Tensor, **others: torch.Tensor | np.ndarray | None) -> None:
    """Refuse memory that a kernel writes while it reads it as another tensor.

    Raises:
        ShapeError: names both.
    """
    start, end = byte_span(written)
    for other_name, other in others.items():
        if other is None:
            continue
        other_start, other_end = byte_span(other)
        if start < other_end and other_start < end:
            raise ShapeError(f"{name} and {other_name} share memory", field=name)


def byte_span(tensor: torch.Tensor | np.ndarray) -> tuple[int, int]:
    """The first address of a tensor with checked strides or a contiguous array, and the one after its last."""
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.ctypes.data + tensor.nbytes
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize if tensor.numel() else start


def _is_plain(tensor: torch.Tensor) -> bool:
    """On the CPU, contiguous and aligned."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.data_ptr() % tensor.itemsize == 0
