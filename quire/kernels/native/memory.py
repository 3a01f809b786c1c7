"""Memory of the native library: tensors on huge pages, and checksums. Called by the worker and the loader; no state."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence

import torch

from quire.errors import NotEnoughMemoryError, ShapeError
from quire.kernels.native.checks import check_is_tensor
from quire.kernels.native.library import load_library
from quire.kernels.native.runtime import NativeRuntime
from quire.utils.memory import HUGE_PAGES, format_bytes, read_memory

HUGE_PAGE_BYTES = 2 << 20
MAX_BYTES = 1 << 46  # half of what a process can address


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of zeros on huge pages, whose memory goes back to the system with its last view.

    Pages are taken when they are first written, and rounded up to 2 MiB: for weights, caches and large buffers.

    Raises:
        ShapeError: a negative size.
        NotEnoughMemoryError: the system refuses the mapping; says how much was asked and how much there is.
    """
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise ShapeError(f"shape is {shape!r}, expected whole numbers", field="shape")
    if any(size < 0 for size in shape):
        raise ShapeError(f"shape {list(shape)} has a negative size", field="shape")
    if not isinstance(dtype, torch.dtype):
        raise ShapeError(f"dtype is {dtype!r}, expected a torch.dtype", field="dtype")
    num_bytes = math.prod(map(int, shape)) * dtype.itemsize
    if num_bytes == 0 and max(shape) <= 1 << 62:
        return torch.empty(tuple(shape), dtype=dtype)
    library = load_library()
    address = library.map_huge(num_bytes) if 0 < num_bytes <= MAX_BYTES else 0
    if address == 0:
        memory = read_memory()
        raise NotEnoughMemoryError(
            f"{format_bytes(num_bytes)} of memory for a tensor of shape {list(shape)} cannot be allocated: "
            f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} is free "
            f"(limited by {memory.limited_by})",
            hint="use a smaller model, fewer KV cache blocks, or a machine with more memory",
            field="memory",
        )
    # The tensor's storage keeps the buffer; the buffer's end is the memory's end.
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    HUGE_PAGES.add(num_bytes)
    release = weakref.finalize(buffer, _unmap, library.unmap_huge, address, num_bytes)
    release.atexit = False  # tensors may outlive the interpreter's exit handlers; the process's end frees everything
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _unmap(unmap_huge: Callable[[int, int], None], address: int, num_bytes: int) -> None:
    HUGE_PAGES.add(-num_bytes)
    unmap_huge(address, num_bytes)


def checksum(runtime: NativeRuntime, tensor: torch.Tensor) -> int:
    """64 bits over the bytes of a contiguous CPU tensor: finds damage, not forgery.

    Raises:
        ShapeError: another device, or strided memory.

    Cost: reads the tensor once; bandwidth bound.
    """
    check_is_tensor("tensor", tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ShapeError(
            f"a checksum needs contiguous CPU memory, not {tensor.device} {tensor.stride()}", field="tensor"
        )
    return int(runtime.library.checksum(runtime.pool, tensor.data_ptr(), tensor.numel() * tensor.itemsize))
