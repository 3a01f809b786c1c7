"""The one-pass kernels against their references, with the same bits from every tier."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native.elementwise import (
    activate_and_mul,
    gated_rms_norm,
    gelu_and_mul,
    is_finite,
    layer_norm,
    multiply,
    rms_norm,
    silu_and_mul,
    transform,
)
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import activation
from quire.kernels.reference import norm as reference
from quire.kernels.reference.transform import transform as reference_transform
from tests.each import each
from tests.kernels.native.guards import assert_close, guarded, randn, same_bits

SIZES = [1, 15, 16, 17, 33, 896]
ROWS = [0, 1, 7, 32]
# One rounding of values below 8 and of the normalised intermediate.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 2e-6}


@each("dtype", TOLERANCE)
@each("size", SIZES)
@each("with_residual", [False, True])
def test_rms_norm_equals_its_reference(
    runtime: NativeRuntime, portable: NativeRuntime, size: int, dtype: torch.dtype, with_residual: bool
):
    for num_rows in ROWS:
        x, weight = randn(num_rows, size, dtype=dtype), randn(size, dtype=dtype)
        residual = randn(num_rows, size, dtype=dtype, seed=1) if with_residual else None
        total = x + residual if residual is not None else x
        given = guarded(residual) if residual is not None else None
        kept = residual.clone() if residual is not None else None
        actual = rms_norm(runtime, x, weight, 1e-6, given.tensor if given else None)
        expected = reference.rms_norm(total, weight, 1e-6)
        assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 4)
        assert same_bits(actual, rms_norm(portable, x, weight, 1e-6, kept))
        if given is not None:
            given.assert_bands()
            assert same_bits(given.tensor, total)


@each("dtype", TOLERANCE)
@each("size", SIZES)
@each("with_residual", [False, True])
@each("with_bias", [False, True])
def test_layer_norm_equals_its_reference(
    runtime: NativeRuntime,
    portable: NativeRuntime,
    size: int,
    dtype: torch.dtype,
    with_residual: bool,
    with_bias: bool,
):
    for num_rows in ROWS:
        x, weight = randn(num_rows, size, dtype=dtype), randn(size, dtype=dtype)
        bias = randn(size, dtype=dtype, seed=2) if with_bias else None
        residual = randn(num_rows, size, dtype=dtype, seed=1) + 3 if with_residual else None
        total = x + residual if residual is not None else x
        given, out = guarded(residual) if residual is not None else None, guarded(torch.zeros_like(x))
        kept = residual.clone() if residual is not None else None
        layer_norm(runtime, x, weight, bias, 1e-5, given.tensor if given else None, out=out.tensor)
        out.assert_bands()
        expected = reference.layer_norm(total, weight, bias, 1e-5)
        assert_close(out.tensor, expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype] / 4)
        assert same_bits(out.tensor, layer_norm(portable, x, weight, bias, 1e-5, kept))
        if given is not None:
            given.assert_bands()
            assert same_bits(given.tensor, total)


def test_rows_of_a_wider_matrix_are_read_by_their_stride(runtime: NativeRuntime):
    wide, weight = randn(5, 64), randn(32)
    assert same_bits(
        rms_norm(runtime, wide[:, :32], weight, 1e-5), rms_norm(runtime, wide[:, :32].clone(), weight, 1e-5)
    )


@each(
    "x, weight",
    [
        (randn(2, 8), randn(9)),
        (randn(2, 8), randn(8, dtype=torch.bfloat16)),
        (randn(8, 2).T, randn(8)),
        (randn(8), randn(8)),
    ],
)
def test_impossible_tensors_are_refused(runtime: NativeRuntime, x: torch.Tensor, weight: torch.Tensor):
    with pytest.raises(ShapeError):
        rms_norm(runtime, x, weight, 1e-5)


def test_results_go_where_the_caller_wants_them(runtime: NativeRuntime):
    x, weight = randn(5, 33), randn(33)
    expected = rms_norm(runtime, x, weight, 1e-5)
    out = guarded(torch.zeros(5, 33))
    assert rms_norm(runtime, x, weight, 1e-5, out=out.tensor) is out.tensor
    out.assert_bands()
    assert same_bits(out.tensor, expected)
    assert same_bits(rms_norm(runtime, x, weight, 1e-5, out=x), expected)
    with pytest.raises(ShapeError, match="out has shape"):
        rms_norm(runtime, x, weight, 1e-5, out=torch.zeros(5, 32))


ACTIVATIONS = {
    "silu": (silu_and_mul, activation.silu_and_mul),
    "gelu": (gelu_and_mul, activation.gelu_and_mul),
    "gelu of a tanh": (
        lambda runtime, x, **out: gelu_and_mul(runtime, x, "tanh", **out),
        lambda x: activation.gelu_and_mul(x, "tanh"),
    ),
}
GATED_SIZES = [1, 15, 16, 17, 2047, 2049]


@each("name", ACTIVATIONS)
@each("dtype", TOLERANCE)
@each("size", GATED_SIZES)
def test_gated_activations_equal_their_references(
    runtime: NativeRuntime, portable: NativeRuntime, size: int, dtype: torch.dtype, name: str
):
    gated, expected = ACTIVATIONS[name]
    for num_rows in (0, 1, 5):
        x = (randn(num_rows, 2 * size) * 3).to(dtype)
        before, out = x.clone(), guarded(torch.zeros(num_rows, size, dtype=dtype))
        gated(runtime, x, out=out.tensor)
        out.assert_bands()
        assert same_bits(x, before)
        # The activation is within 3e-7 of its gate, rounded, and so is the product; either may fall the other way.
        rtol = {torch.bfloat16: 2.0**-7, torch.float32: 2e-6}[dtype]
        gates, ups = x.double().chunk(2, dim=-1)
        assert_close(out.tensor, expected(x), atol=3e-7 * (gates * ups).abs(), rtol=rtol)
        assert same_bits(out.tensor, gated(portable, x))
        for row in range(num_rows):
            assert same_bits(out.tensor[row : row + 1], gated(runtime, x[row : row + 1]))


@each("name", ACTIVATIONS)
def test_the_activation_is_rounded_before_the_product(runtime: NativeRuntime, name: str):
    gated, expected = ACTIVATIONS[name]
    gates, ups = (randn(8, 8192) * 2).to(torch.bfloat16).chunk(2, dim=-1)
    exact = expected(torch.cat((gates.double(), torch.ones_like(gates)), -1)).to(torch.bfloat16)
    # All but a few of the far tail of gelu, where its 3e-7 decide a rounding.
    assert (gated(runtime, torch.cat((gates, ups), -1)) == exact * ups).float().mean() > 0.99


@each("name", ACTIVATIONS)
def test_gates_of_any_size_stay_accurate(runtime: NativeRuntime, name: str):
    gated, expected = ACTIVATIONS[name]
    gates = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e30, 1e-30, -1e-30, torch.inf])))
    x = torch.stack((gates, torch.ones_like(gates)), 1)
    actual, wanted = gated(runtime, x)[:, 0], expected(x.double())[:, 0]
    assert actual[-1] == torch.inf
    assert_close(actual[:-1], wanted[:-1], atol=2e-6, rtol=1e-6)  # gelu: 3e-7 of the gate, below 6 in the tail
    assert bool(gated(runtime, torch.tensor([[torch.nan, 1.0]])).isnan().all())


def test_gated_rows_of_a_wider_matrix_are_read_by_their_stride(runtime: NativeRuntime):
    wide = randn(5, 64)
    assert same_bits(silu_and_mul(runtime, wide[:, :36]), silu_and_mul(runtime, wide[:, :36].clone()))


def test_impossible_gates_are_refused(runtime: NativeRuntime):
    with pytest.raises(ShapeError):
        silu_and_mul(runtime, randn(2, 7))
    with pytest.raises(ShapeError):
        silu_and_mul(runtime, randn(2, 8), out=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="expected 'none' or 'tanh'"):
        gelu_and_mul(runtime, randn(2, 8), "fast")


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found_wherever_it_is(runtime: NativeRuntime, dtype: torch.dtype, bad: float):
    x = torch.full((300_001,), torch.finfo(dtype).max, dtype=dtype)
    x[::2] *= -1
    x[::3] = 0
    assert is_finite(runtime, x) and is_finite(runtime, x[:0]) and is_finite(runtime, x[:300].view(5, 60))
    for at in (0, 1, 131_071, 131_072, 300_000):
        changed = x.clone()
        changed[at] = bad
        assert not is_finite(runtime, changed)
        assert is_finite(runtime, changed[:at]) and is_finite(runtime, changed[at + 1 :])


def test_only_contiguous_floats_are_looked_through(runtime: NativeRuntime):
    with pytest.raises(ShapeError):
        is_finite(runtime, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ShapeError):
        is_finite(runtime, torch.zeros(3, 4).T)


@each("dtype", TOLERANCE)
@each("kind", ["none", "silu", "sigmoid"])
@each("size", [1, 33, 2049])
def test_products_with_gates_equal_their_reference(
    runtime: NativeRuntime, portable: NativeRuntime, size: int, kind: str, dtype: torch.dtype
):
    x, gate = (randn(5, 2 * size) * 3).to(dtype).chunk(2, dim=-1)
    out = guarded(torch.zeros(5, size, dtype=dtype))
    multiply(runtime, x, gate, kind, out=out.tensor)
    out.assert_bands()
    rtol = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6}[dtype]
    assert_close(out.tensor, activation.multiply(x, gate, kind), atol=1e-6, rtol=rtol)
    assert same_bits(out.tensor, multiply(portable, x, gate, kind))
    shared = multiply(runtime, x, gate[2].contiguous(), kind)
    assert same_bits(shared, multiply(runtime, x, gate[2].repeat(5, 1), kind))
    with pytest.raises(ValueError, match="expected one of"):
        multiply(runtime, x, gate, "relu")


@each("dtype", TOLERANCE)
@each("name", ["none", "silu", "gelu", "gelu_tanh", "relu", "relu2"])
@each("size", [1, 17, 2049])
def test_elements_are_activated_scaled_and_added(
    runtime: NativeRuntime, portable: NativeRuntime, size: int, name: str, dtype: torch.dtype
):
    x, addend = (randn(5, 2 * size) * 3).to(dtype).chunk(2, dim=-1)
    rtol = {torch.bfloat16: 2.0**-8, torch.float32: 2e-6}[dtype]
    for factor, added in ((1.0, None), (-0.7, addend)):
        out = guarded(torch.zeros(5, size, dtype=dtype))
        transform(runtime, x, name, factor, added, out=out.tensor)
        out.assert_bands()
        assert_close(out.tensor, reference_transform(x, name, factor, added), atol=3e-6, rtol=rtol)
        assert same_bits(out.tensor, transform(portable, x, name, factor, added))
        for place in ("x", "addend"):
            given = {"x": x.contiguous(), "addend": addend.contiguous()}
            transform(runtime, given["x"], name, factor, given["addend"], out=given[place])
            assert same_bits(given[place], transform(portable, x, name, factor, addend))
    both = torch.cat((x, addend), dim=-1)
    gated = activate_and_mul(runtime, both, name)
    assert_close(gated, transform(runtime, x, name) * addend, atol=3e-6, rtol=rtol)
    assert same_bits(gated, activate_and_mul(portable, both, name))


def test_impossible_transforms_are_refused(runtime: NativeRuntime):
    x = randn(4, 8)
    for wrong in ({"addend": randn(4, 7)}, {"addend": randn(8, 4).T}, {"out": x.view(8, 4)}, {"factor": "2"}):
        with pytest.raises(ShapeError):
            transform(runtime, x, **wrong)
    with pytest.raises(ShapeError, match="share memory"):
        transform(runtime, x[1:], out=x[:3])
    for call in (transform, activate_and_mul):
        with pytest.raises(ValueError, match="expected one of"):
            call(runtime, x, "tanh")


@each("dtype", TOLERANCE)
@each("gate_first", [False, True])
@each(("num_groups", "size", "is_shared"), [(1, 17, True), (5, 16, True), (3, 40, False)])
def test_gated_norms_equal_their_reference(
    runtime: NativeRuntime, portable: NativeRuntime, num_groups: int, size: int, is_shared: bool, gate_first: bool,
    dtype: torch.dtype,
):  # fmt: skip
    x, gate = randn(7, 2 * num_groups * size, dtype=dtype).chunk(2, dim=-1)
    weight = randn(size if is_shared else num_groups * size, dtype=dtype)
    options = {"num_groups": num_groups, "gate_first": gate_first}
    out = guarded(torch.zeros(7, num_groups * size, dtype=dtype))
    gated_rms_norm(runtime, x, gate, weight, 1e-6, **options, out=out.tensor)
    out.assert_bands()
    expected = reference.gated_rms_norm(x, gate, weight, 1e-6, **options)
    assert_close(out.tensor, expected, atol=1e-5, rtol={torch.bfloat16: 2.0**-8, torch.float32: 3e-6}[dtype])
    assert same_bits(out.tensor, gated_rms_norm(portable, x, gate, weight, 1e-6, **options))
    with pytest.raises(ShapeError):
        gated_rms_norm(runtime, x, gate, weight[1:], 1e-6, **options)
