"""The layers on the C++ library: what is loaded is what is stored, and gates cost nothing but time."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.native.elementwise import silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.linear import MergedLinear
from quire.layers.native import NativeKernels
from quire.layers.options import LayerOptions
from quire.models.weights import relative_error

# Relative root mean square of the rounding: to 8 bits of mantissa, to 1 / 254 of a row's maximum, to 4 bits.
ERRORS = {None: 2**-9, "int8": 0.01, "int4": 0.15}

quantizations = pytest.mark.parametrize("quantization", ERRORS, ids=str)


def merged(quantization: str | None, size: int, *, bias: bool = False) -> MergedLinear:
    """Gates and ups of 70 inputs, filled with random numbers."""
    kernels = NativeKernels(NativeRuntime("portable"), torch.bfloat16, quantization)
    options = LayerOptions(torch.bfloat16, torch.device("cpu"), kernels)
    layer = MergedLinear(70, {"gate_proj": size, "up_proj": size}, bias=bias, options=options)
    torch.manual_seed(0)
    for target in dict(layer.targets("mlp.gate_up_proj")).values():
        assert target.load(torch.randn(target.shape))
    return layer


@quantizations
def test_stored_rows_are_those_loaded_but_for_rounding(quantization: str | None):
    targets = dict(merged(quantization, 37).targets("mlp.gate_up_proj"))
    for value, target in enumerate(targets.values()):
        given = torch.randn(target.shape) + value
        assert target.load(given) and target.stored().shape == target.shape == (37, 70)
        assert relative_error(given, target.stored()) < ERRORS[quantization]


@quantizations
@pytest.mark.parametrize("size", [32, 37], ids="{} gates".format)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_gated_product_has_the_bits_of_the_product_then_the_gate(quantization: str | None, size: int, bias: bool):
    layer = merged(quantization, size, bias=bias)
    x = torch.randn(5, 70, dtype=torch.bfloat16)
    assert torch.equal(layer.forward_gated(x), silu_and_mul(NativeRuntime("portable"), layer(x)))
    assert layer.forward_gated(x[:0]).shape == (0, size)
