"""The norms, the rotation and the gated activation against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.reference.activation import silu_and_mul
from quire.kernels.reference.norm import add_rms_norm, rms_norm
from quire.kernels.reference.rotary import rotary_embedding

# A few roundings of values below 8.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}
ROWS = [0, 1, 13]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert bool(((actual.double() - expected).abs() <= TOLERANCES[actual.dtype]).all())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids="{} rows".format)
def test_rms_norm_divides_by_the_root_mean_square(rows: int, dtype: torch.dtype):
    x, weight = randn(rows, 33, dtype=dtype), randn(33, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_survives_extreme_rows():
    rows = torch.stack((torch.zeros(8), torch.full((8,), 1e18), torch.full((8,), 1e-18)))
    out = rms_norm(rows, torch.ones(8), 1e-5)
    assert bool(out.isfinite().all()) and torch.allclose(out[1], torch.ones(8))


def test_add_rms_norm_returns_the_sum_too():
    x, residual, weight = randn(5, 16), randn(5, 16) + 1, randn(16)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rotary_dim", [8, 4], ids=["whole head", "part of the head"])
@pytest.mark.parametrize("rows", ROWS, ids="{} rows".format)
def test_rotation_turns_each_pair_by_its_angle(rows: int, rotary_dim: int, dtype: torch.dtype):
    x, angles = randn(rows, 3, 8, dtype=dtype), randn(rows, 1, rotary_dim // 2)
    pairs = torch.complex(x[..., : rotary_dim // 2].double(), x[..., rotary_dim // 2 : rotary_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    before = x.clone()
    assert_close(rotary_embedding(x, angles.cos(), angles.sin()), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids="{} rows".format)
def test_silu_and_mul_gates_the_second_half_by_the_first(rows: int, dtype: torch.dtype):
    x = randn(rows, 14, dtype=dtype)
    gate, up = x.double()[:, :7], x.double()[:, 7:]
    assert_close(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)


def test_silu_of_large_negative_gates_is_zero():
    assert silu_and_mul(torch.tensor([[-1e4, math.inf, 1.0, 2.0]])).tolist() == [[0.0, math.inf]]
