"""Rows that are taken out of a matrix, and put back: exact copies, of rows that are there."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.rows import put_rows, take_rows
from quire.kernels.native.runtime import NativeRuntime


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_taken_and_put_back_bit_for_bit(dtype: torch.dtype):
    runtime, ids = NativeRuntime(), torch.tensor([6, 0, 3])
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :33]
    taken = take_rows(runtime, x, ids)
    assert torch.equal(taken, x[ids]) and taken.is_contiguous()
    assert torch.equal(put_rows(runtime, taken, ids, 9)[ids], taken)
    nothing = torch.empty(0, dtype=torch.int64)
    assert take_rows(runtime, x, nothing).shape == (0, 33) and put_rows(runtime, taken[:0], nothing, 2).shape == (2, 33)


def test_rows_that_are_not_there_and_other_matrices_are_refused():
    runtime, x = NativeRuntime(), torch.zeros(4, 8)
    for ids in ([4], [-1], [0, 2**40]):
        with pytest.raises(ShapeError, match="a row that x lacks"):
            take_rows(runtime, x, torch.tensor(ids))
        with pytest.raises(ShapeError, match="a row that the result lacks"):
            put_rows(runtime, x[: len(ids)], torch.tensor(ids), 4)
    with pytest.raises(ShapeError, match="ids has shape"):
        put_rows(runtime, x, torch.tensor([1, 2]), 4)
    with pytest.raises(ShapeError, match="ids is torch.int32"):
        take_rows(runtime, x, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ShapeError, match="x is torch.float16"):
        take_rows(runtime, x.half(), torch.tensor([1]))
