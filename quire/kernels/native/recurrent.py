"""The boundary of recurrent kernels: the requests of a step, and the states of blocks. Called by their wrappers."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import check_is_tensor, check_tensor
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch

_INDEX = (torch.int32,)


def native_batch(runtime: NativeRuntime, batch: RecurrentBatch, num_tokens: int) -> Any:
    """The library's view of a batch. It checks the indices themselves when a kernel runs.

    Raises:
        ShapeError: a size, dtype, device or stride differs from what `RecurrentBatch` says.
    """
    if not isinstance(batch, RecurrentBatch):
        raise ShapeError(f"batch is {type(batch).__name__}, expected a RecurrentBatch", field="batch")
    check_tensor("write_blocks", batch.write_blocks, _INDEX, (-1,))
    num_reqs = len(batch.write_blocks)
    check_tensor("query_start_loc", batch.query_start_loc, _INDEX, (num_reqs + 1,))
    check_tensor("read_blocks", batch.read_blocks, _INDEX, (num_reqs,))
    if batch.token_blocks is not None:
        check_tensor("token_blocks", batch.token_blocks, _INDEX, (num_tokens,))
    return runtime.library.RecurrentBatch(
        batch.query_start_loc.data_ptr(), batch.read_blocks.data_ptr(), batch.write_blocks.data_ptr(), num_reqs,
        num_tokens, 0 if batch.token_blocks is None else batch.token_blocks.data_ptr(),
    )  # fmt: skip


def native_states(
    runtime: NativeRuntime, name: str, states: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> Any:
    """The library's view of a state's tensor in every block.

    Args:
        states: [num_blocks, *shape] of `dtype`; the elements of a block lie together, blocks any distance apart.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.
    """
    check_is_tensor(name, states)
    if states.dim() != len(shape) + 1 or states.shape[1:] != shape or not len(states):
        raise ShapeError(f"{name} has shape {list(states.shape)}, expected [blocks, {str(list(shape))[1:]}", field=name)
    check_tensor(name, states[0], (dtype,), shape)
    stride = states.stride(0)
    if len(states) > 1 and stride < states[0].numel():
        raise ShapeError(f"{name} has blocks that overlap: stride {stride}", field=name)
    return runtime.library.StateTensor(states.data_ptr(), len(states), stride)
