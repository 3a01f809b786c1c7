"""Linear, embedding, norm, logits head and attention layer, one by one."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quire.attention.backend import AttentionParams, Rotation
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.context import ForwardContext
from quire.config.model_arch import NormArch
from quire.layers.attention import Attention
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear, MergedLinear
from quire.layers.linear_method import UnquantizedLinearMethod
from quire.layers.norm import Norm
from quire.layers.options import LayerOptions
from tests.models.stepping import make_metadata

FLOAT32 = LayerOptions(torch.float32, torch.device("cpu"))


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    return layer


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_linear_multiplies_and_adds(bias: bool):
    layer = filled(Linear(5, 3, bias=bias, options=FLOAT32))
    x = torch.randn(4, 5)
    expected = x @ layer.weight.T + (layer.bias if bias else 0)
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert layer(x[:0]).shape == (0, 3)


def test_merged_linear_is_its_projections_side_by_side():
    layer = filled(MergedLinear(5, {"q_proj": 4, "k_proj": 2}, bias=True, options=FLOAT32))
    x = torch.randn(3, 5)
    weights, biases = torch.split(layer.weight, [4, 2]), torch.split(layer.bias, [4, 2])
    expected = torch.cat([x @ w.T + b for w, b in zip(weights, biases, strict=True)], dim=-1)
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_targets_are_views_so_that_loading_fills_the_fused_weight():
    layer = MergedLinear(2, {"a": 1, "b": 3}, bias=True, options=FLOAT32)
    targets = dict(layer.targets("model.mlp.a_b_proj"))
    assert list(targets) == [f"model.mlp.{shard}.{kind}" for shard in "ab" for kind in ("weight", "bias")]
    for value, target in enumerate(targets.values()):
        assert target.load(torch.full(target.shape, float(value)))
    assert layer.weight[:, 0].tolist() == [0, 2, 2, 2] and layer.bias.tolist() == [1, 3, 3, 3]
    assert not targets["model.mlp.a.bias"].load(torch.tensor([float("nan")]))


def test_a_linear_method_decides_how_a_weight_is_stored():
    class Int8Method(UnquantizedLinearMethod):
        def create_weights(self, layer, output_size, input_size, dtype, device) -> None:
            layer.register_buffer("packed", torch.ones(output_size, input_size, dtype=torch.int8))

        def apply(self, layer, x, bias, out_dtype) -> torch.Tensor:
            return x @ layer.packed.T.float()

    layer = Linear(4, 2, bias=False, options=FLOAT32, method=Int8Method())
    assert layer(torch.ones(1, 4)).tolist() == [[4.0, 4.0]] and not list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_embedding_looks_up_rows(dtype: torch.dtype):
    layer = filled(TokenTable(7, 3, options=FLOAT32))
    assert torch.equal(layer.lookup(torch.tensor([6, 0, 6], dtype=dtype)), layer.weight[[6, 0, 6]])
    assert layer.lookup(torch.zeros(0, dtype=dtype)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_equals_that_of_transformers_bit_for_bit(dtype: torch.dtype):
    layer = filled(Norm(24, NormArch(eps=1e-6), options=LayerOptions(dtype, torch.device("cpu"))))
    reference = Qwen3RMSNorm(24, 1e-6).to(dtype)
    reference.weight.data.copy_(layer.weight)
    x, residual = torch.randn(2, 9, 24).to(dtype)
    assert torch.equal(layer(x), reference(x))
    normed, total = layer.add_and_norm(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(normed, reference(x + residual))


def test_logits_are_float32():
    table = filled(TokenTable(11, 4, options=LayerOptions(torch.bfloat16, torch.device("cpu"))))
    rows = torch.ones(2, 4, dtype=torch.bfloat16)
    assert table.logits(rows).dtype == torch.float32
    assert torch.equal(table.logits(rows), (rows @ table.weight.T).float())


def test_the_attention_layer_uses_its_own_cache_and_metadata():
    params = AttentionParams(num_heads=2, num_kv_heads=1, head_size=4, scale=1.0)
    layer = Attention(params, TorchReferenceBackend(), layer_idx=1)
    caches = tuple(torch.zeros(TorchReferenceBackend.kv_cache_shape(3, 4, 1, 4)) for _ in range(2))
    metadata = make_metadata([2], [2], [[2]], block_size=4)
    no_turn = Rotation(torch.ones(2, 2), torch.zeros(2, 2), torch.tensor([0, 1]))
    qkv = torch.cat((torch.randn(2, 8), torch.ones(2, 8)), dim=1)
    output = layer(qkv, no_turn, ForwardContext((metadata,) * 2, caches))
    assert torch.allclose(output, torch.ones(2, 8))
    assert not caches[0].any() and bool((caches[1][:, 2, :2] == 1).all())
