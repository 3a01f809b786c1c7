"""The one-pass kernels against their references, with the same bits from every tier."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.elementwise import rms_norm
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import norm as reference
from tests.kernels.native.guards import assert_close, guarded, randn, same_bits

SIZES = [1, 15, 16, 17, 33, 896]
ROWS = [0, 1, 7, 32]
# One rounding of values below 8 and of the normalised intermediate.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", ROWS, ids="{} rows".format)
@pytest.mark.parametrize("size", SIZES, ids="size {}".format)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_rms_norm_equals_its_reference(
    runtime: NativeRuntime, portable: NativeRuntime, size: int, num_rows: int, dtype: torch.dtype, with_residual: bool
):
    x, weight = randn(num_rows, size, dtype=dtype), randn(size, dtype=dtype)
    residual = randn(num_rows, size, dtype=dtype, seed=1) if with_residual else None
    total = x + residual if residual is not None else x
    given = guarded(residual) if residual is not None else None
    actual = rms_norm(runtime, x, weight, 1e-6, given.tensor if given else None)
    assert_close(actual, reference.rms_norm(total, weight, 1e-6), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 4)
    assert same_bits(actual, rms_norm(portable, x, weight, 1e-6, residual.clone() if residual is not None else None))
    if given is not None:
        given.assert_bands()
        assert same_bits(given.tensor, total)


def test_rows_of_a_wider_matrix_are_read_by_their_stride(runtime: NativeRuntime):
    wide, weight = randn(5, 64), randn(32)
    assert same_bits(
        rms_norm(runtime, wide[:, :32], weight, 1e-5), rms_norm(runtime, wide[:, :32].clone(), weight, 1e-5)
    )


@pytest.mark.parametrize(
    "x, weight",
    [
        (randn(2, 8), randn(9)),
        (randn(2, 8), randn(8, dtype=torch.bfloat16)),
        (randn(8, 2).T, randn(8)),
        (randn(8), randn(8)),
    ],
    ids=["another size", "another dtype", "columns", "no rows"],
)
def test_impossible_tensors_are_refused(runtime: NativeRuntime, x: torch.Tensor, weight: torch.Tensor):
    with pytest.raises(ShapeError):
        rms_norm(runtime, x, weight, 1e-5)
