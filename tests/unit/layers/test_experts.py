"""The projections of a layer's experts: the native ones compute what the plain ones do, in every format."""

from __future__ import annotations

import pytest
import torch

from quire.config.model_arch import RouterArch
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.experts import ExpertKernels, ExpertLinear
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels

CPU, F32 = torch.device("cpu"), torch.float32
NUM_EXPERTS, INPUTS = 5, 70


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(num_threads=2)


def experts_of(kernels: LayerKernels, outputs: int, *, bias: bool = False) -> ExpertLinear:
    """A layer with the same random weights whatever the kernels, packed in two parts for each expert."""
    method = kernels.experts_method(outputs, INPUTS)
    layer = ExpertLinear(NUM_EXPERTS, INPUTS, outputs, method, F32, CPU, bias=bias)
    for expert in range(NUM_EXPERTS):
        weight = randn(outputs, INPUTS, seed=expert)
        assert method.row_target(layer, expert, 0, 13).load(weight[:13])
        assert method.row_target(layer, expert, 13, outputs - 13).load(weight[13:])
    if layer.bias is not None:
        layer.bias.copy_(randn(NUM_EXPERTS, outputs, seed=99))
    return layer


@pytest.mark.parametrize("outputs", [64, 52], ids=["whole panels", "parts of panels"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_native_experts_compute_what_plain_ones_do(runtime: NativeRuntime, outputs: int, bias: bool):
    with torch.no_grad():
        native = experts_of(NativeKernels(runtime, F32), outputs, bias=bias)
        plain = experts_of(TorchKernels(), outputs, bias=bias)
    x = randn(9, INPUTS)
    routing = ExpertKernels().route(randn(9, NUM_EXPERTS, seed=1), 2, None, RouterArch())
    rows = x[routing.rows.long()]
    for given, are_rows in ((x, False), (rows, True)):
        torch.testing.assert_close(
            native(given, routing, are_rows=are_rows), plain(given, routing, are_rows=are_rows), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            native.forward_gated(given, routing, are_rows=are_rows),
            plain.forward_gated(given, routing, are_rows=are_rows), atol=1e-3, rtol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_what_an_expert_stores_is_its_own_weight(runtime: NativeRuntime, quantization: str | None):
    layer = experts_of(NativeKernels(runtime, F32, quantization), 52)
    largest = {None: 0.0, "int8": 0.01, "int4": 0.2}[quantization]
    for expert in range(NUM_EXPERTS):
        given = randn(52, INPUTS, seed=expert)
        stored = layer.method.row_target(layer, expert, 0, 52).stored()
        assert float((stored - given).norm() / given.norm()) <= largest


def test_a_transposed_matrix_is_packed_as_it_is_meant(runtime: NativeRuntime):
    layer = experts_of(NativeKernels(runtime, F32), 52)
    stored_transposed = randn(INPUTS, 52, seed=5)
    target = layer.method.row_target(layer, 3, 0, 52)
    assert target.load(stored_transposed.t())
    assert torch.equal(target.stored(), stored_transposed.t())
