"""Latent attention with absorbed projections against its definition: keys and values made for every head."""

from __future__ import annotations

import pytest
import torch

from quire.attention.backend import AttentionBackend, Rotation
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.context import ForwardContext
from quire.attention.latent import LatentParams, latent_backend_of
from quire.config.hf_rope import RopeConfig
from quire.errors import UnsupportedError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.rotary import rotary_embedding
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.latent_attention import LatentAttention
from quire.layers.native import NativeKernels
from quire.layers.options import LayerOptions
from quire.layers.rope import RotaryEmbedding
from tests.models.stepping import make_metadata

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
HEADS, LATENT, NOPE, ROPE, VALUE, BLOCK_SIZE, NUM_BLOCKS = 3, 40, 12, 8, 20, 16, 64
PAGES = [[3, 9, 1, 20, 40, 41, 42, 43, 44, 45], [5], list(range(10, 20)) + list(range(21, 31))]
PARAMS = LatentParams(num_heads=HEADS, latent_size=LATENT, rope_size=ROPE, scale=0.21, eps=1e-6)
# (query_len, seq_len) of three requests, step after step.
STEPS = [[(70, 70), (3, 3), (200, 200)], [(1, 71), (10, 13), (100, 300)], [(1, 72), (1, 14), (1, 301)]]


def make_layer(backend: AttentionBackend, kernels: LayerKernels, dtype: torch.dtype) -> LatentAttention:
    options = LayerOptions(dtype, CPU, kernels)
    layer = LatentAttention(PARAMS, NOPE, VALUE, backend, 0, options=options)
    assert layer.up.target().load(drawn(HEADS * (NOPE + VALUE), LATENT))
    return layer


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.3


def native(runtime: NativeRuntime, dtype: torch.dtype) -> LatentAttention:
    return make_layer(NativeCpuBackend(runtime), NativeKernels(runtime, dtype), dtype)


def torch_layer(dtype: torch.dtype) -> LatentAttention:
    return make_layer(TorchReferenceBackend(), TorchKernels(), dtype)


class Sequences:
    """The inputs of three sequences of 301 tokens and the caches of one layer."""

    def __init__(self, layer: LatentAttention, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.query = drawn(3 * 301, HEADS * (NOPE + ROPE), 1).to(dtype).view(3, 301, -1)
        self.latent = drawn(3 * 301, LATENT + ROPE, 2).to(dtype).view(3, 301, -1)
        rope = RopeConfig(rotary_dim=ROPE)
        self.rotary = RotaryEmbedding(rope, 301, CPU)
        self.cache = torch.zeros(layer.backend.cache_shape(NUM_BLOCKS, BLOCK_SIZE, PARAMS.width), dtype=dtype)

    def run(self, step: list[tuple[int, int]], requests: tuple[int, ...] = (0, 1, 2)) -> list[torch.Tensor]:
        """Each request's outputs of one step."""
        places = [(request, slice(n - num, n)) for request, (num, n) in zip(requests, step, strict=True)]
        query, latent = (torch.cat([x[place] for place in places]) for x in (self.query, self.latent))
        positions = torch.cat([torch.arange(n - num, n) for num, n in step])
        pages = [PAGES[request] for request in requests]
        metadata = make_metadata([num for num, _ in step], [n for _, n in step], pages, BLOCK_SIZE)
        context = ForwardContext((metadata,), (self.cache,))
        gain = (drawn(1, LATENT)[0] + 1).to(self.dtype)
        output = self.layer(query, latent, gain, self.rotary(positions), context)
        return list(output.split([num for num, _ in step]))

    def expected(self, request: int, num: int, seq_len: int) -> torch.Tensor:
        """By the definition, in float64: [num, HEADS * VALUE] of the last tokens of a sequence."""
        up = drawn(HEADS * (NOPE + VALUE), LATENT).double().view(HEADS, NOPE + VALUE, LATENT)
        gain, latent = (drawn(1, LATENT)[0] + 1).double(), self.latent[request, :seq_len].double()
        rotation: Rotation = self.rotary(torch.arange(seq_len))
        cos, sin = (table[:seq_len, None].double() for table in (rotation.cos, rotation.sin))
        query = self.query[request, :seq_len].double().view(seq_len, HEADS, -1)
        query = torch.cat((query[..., :NOPE], rotary_embedding(query[..., NOPE:], cos, sin)), dim=-1)
        rows = torch.einsum("hvl,tl->thv", up, rms_norm(latent[:, :LATENT], gain, PARAMS.eps))
        shared = rotary_embedding(latent[:, None, LATENT:], cos, sin).expand(-1, HEADS, -1)
        keys, values = torch.cat((rows[..., :NOPE], shared), dim=-1), rows[..., NOPE:]
        scores = torch.einsum("thk,shk->hts", query, keys) * PARAMS.scale
        is_later = torch.ones(seq_len, seq_len).triu(1).bool()
        weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
        return torch.einsum("hts,shv->thv", weights, values)[seq_len - num :].flatten(1)


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("dtype, atol", [(F32, 1e-5), (BF16, 3e-2)], ids=["float32", "bfloat16"])
def test_steps_of_prompts_and_decodes_equal_the_definition(kind: str, dtype: torch.dtype, atol: float):
    layer = native(NativeRuntime(num_threads=2), dtype) if kind == "native" else torch_layer(dtype)
    sequences = Sequences(layer, dtype)
    for step in STEPS:
        for request, (output, (num, seq_len)) in enumerate(zip(sequences.run(step), step, strict=True)):
            assert output.dtype == dtype
            difference = (output.double() - sequences.expected(request, num, seq_len)).abs().max()
            assert not difference > atol, f"request {request} of {step}"


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_token_has_the_same_bits_decoded_and_in_any_chunk_of_a_prompt(chunk: int, dtype: torch.dtype):
    runtime = NativeRuntime(num_threads=2)
    whole = Sequences(native(runtime, dtype), dtype).run([(70, 70), (13, 13), (300, 300)])[0]
    sequences = Sequences(native(NativeRuntime("portable"), dtype), dtype)
    for start in range(0, 70, chunk):
        end = min(70, start + chunk)
        assert torch.equal(sequences.run([(end - start, end)], (0,))[0], whole[start:end])


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_the_stored_up_projections_are_the_checkpoints(kind: str):
    layer = native(NativeRuntime(), F32) if kind == "native" else torch_layer(F32)
    target = layer.up.target()
    assert target.shape == (HEADS * (NOPE + VALUE), LATENT)
    assert torch.equal(target.stored(), drawn(HEADS * (NOPE + VALUE), LATENT))
    assert not target.load(torch.full(target.shape, float("nan")))


def test_rows_of_padding_come_back_as_zeros_and_are_not_cached():
    for layer in (native(NativeRuntime(), F32), torch_layer(F32)):
        cache = torch.zeros(layer.backend.cache_shape(NUM_BLOCKS, BLOCK_SIZE, PARAMS.width))
        rotation = RotaryEmbedding(RopeConfig(rotary_dim=ROPE), 8, CPU)(torch.tensor([0, 1, 0]))
        context = ForwardContext((make_metadata([2], [2], PAGES[:1], BLOCK_SIZE),), (cache,))
        query, latent = torch.full((3, HEADS * (NOPE + ROPE)), float("nan")), torch.full((3, 48), float("nan"))
        query[:2], latent[:2] = 1.0, 1.0
        output = layer(query, latent, torch.ones(LATENT), rotation, context)
        assert bool((output[2] == 0).all()) and bool(output.isfinite().all())
        assert int(cache.view(-1, PARAMS.width).any(dim=1).sum()) == 2


def test_a_backend_without_latent_attention_is_refused_by_name():
    class Plain(AttentionBackend):
        name = "plain"
        unsupported_reasons = TorchReferenceBackend.unsupported_reasons
        kv_cache_shape = TorchReferenceBackend.kv_cache_shape
        forward = TorchReferenceBackend.forward

    with pytest.raises(UnsupportedError, match="'plain' does not have latent attention"):
        latent_backend_of(Plain())
