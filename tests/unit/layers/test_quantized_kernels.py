"""The kernels of a model with a quantization plugin: everything but its products is computed as without."""

from __future__ import annotations

import torch

from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.linear_method import LinearMethod, UnquantizedLinearMethod
from quire.layers.quantization import Quantization, QuantizedKernels


class Plain(Quantization):
    def linear_method(self, output_size: int, input_size: int) -> LinearMethod:
        return UnquantizedLinearMethod()


class Marked(TorchKernels):
    rows_at_once = 7

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return torch.full_like(x, 7.0)


def test_no_operation_falls_back_to_a_default_of_the_interface():
    public = {name for name in vars(LayerKernels) if not name.startswith("_")}
    assert public - {"shards"} <= vars(QuantizedKernels).keys(), "shards: formats of plugins are not divided"
    kernels = QuantizedKernels(Marked(), Plain(Marked(), torch.float32))
    assert kernels.rows_at_once == 7
    x = torch.ones(2, 4)
    assert kernels.layer_norm(x, x[0], None, 1e-5).eq(7.0).all()
    assert kernels.add(x, x.clone()).eq(2.0).all()
