"""The native backend as the engine calls it: plain and fused, with padding, against the reference kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.attention.backend import AttentionParams, HeadNorms, Rotation
from quire.attention.backends import native_cpu
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.metadata import AttentionMetadata
from quire.config.alibi import alibi_slopes
from quire.errors import NativeLibraryError
from quire.kernels.native.attention import unpack_kv_cache
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.rotary import rotary_embedding
from tests.models.stepping import make_metadata

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, HEAD_SIZE = 32, 40, 64
PAGES = [[3, 9, 1, 20], [5], [30, 31, 2, 7, 11, 12, 13, 14, 15, 16]]
# (query_len, seq_len) of three requests, step after step.
STEPS = [[(70, 70), (3, 3), (300, 300)], [(1, 71), (20, 23), (1, 301)]]


def params_of(window: int | None = None, head_size: int = HEAD_SIZE) -> AttentionParams:
    return AttentionParams(num_heads=6, num_kv_heads=2, head_size=head_size, scale=0.125, sliding_window=window)


def make_cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(NativeCpuBackend.kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, 2, HEAD_SIZE), dtype=dtype)


def metadata_of(step: list[tuple[int, int]]) -> AttentionMetadata:
    return make_metadata([n for n, _ in step], [n for _, n in step], PAGES, BLOCK_SIZE)


def expected_of(
    params: AttentionParams, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    return paged_attention(
        query, *unpack_kv_cache(kv_cache, HEAD_SIZE), metadata.block_table, metadata.query_start_loc,
        metadata.seq_lens, params.scale, params.sliding_window,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 50], ids=["full", "window"])
def test_steps_of_prompts_and_decodes_equal_the_reference(window: int | None, dtype: torch.dtype):
    backend, params, cache = NativeCpuBackend(NativeRuntime(num_threads=2)), params_of(window), make_cache(dtype)
    generator = torch.Generator().manual_seed(0)
    for step in STEPS:
        metadata = metadata_of(step)
        num_tokens = metadata.num_tokens
        qkv = torch.randn(num_tokens + 2, 10, HEAD_SIZE, generator=generator).to(dtype)
        qkv[num_tokens:] = float("nan")
        query, key, value = qkv.split((6, 2, 2), dim=1)
        output = backend.forward(params, query, key, value, cache, metadata)
        expected = expected_of(params, query[:num_tokens], cache, metadata)
        assert torch.allclose(output[:num_tokens], expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert bool((output[num_tokens:] == 0).all()) and output.dtype == dtype
        keys, _ = unpack_kv_cache(cache, HEAD_SIZE)
        assert torch.equal(keys.flatten(0, 1)[metadata.slot_mapping], key[:num_tokens])


@pytest.mark.parametrize("has_norm", [False, True], ids=["no norm", "norm of heads"])
def test_the_fused_block_is_norm_rotation_and_attention(has_norm: bool):
    backend, params = NativeCpuBackend(NativeRuntime(num_threads=2)), params_of()
    generator = torch.Generator().manual_seed(0)
    caches = [make_cache(torch.float32) for _ in range(2)]
    angles = torch.randn(400, HEAD_SIZE // 2, generator=generator)
    norms = [torch.randn(HEAD_SIZE, generator=generator) if has_norm else None for _ in range(2)]
    head_norms = HeadNorms(norms[0], norms[1], 1e-5) if norms[0] is not None and norms[1] is not None else None
    for step in STEPS:
        metadata = metadata_of(step)
        positions = torch.cat([torch.arange(n - query_len, n) for query_len, n in step])
        qkv = torch.randn(metadata.num_tokens, 10 * HEAD_SIZE, generator=generator)
        query, key, value = qkv.clone().unflatten(1, (10, HEAD_SIZE)).split((6, 2, 2), dim=1)
        if norms[0] is not None and norms[1] is not None:
            query, key = rms_norm(query, norms[0], 1e-5), rms_norm(key, norms[1], 1e-5)
        turn = angles[positions].unsqueeze(1)
        query, key = (rotary_embedding(x, turn.cos(), turn.sin()) for x in (query, key))
        expected = backend.forward(params, query, key, value.contiguous(), caches[0], metadata)
        output = backend.forward_fused(
            params, qkv, Rotation(angles.cos(), angles.sin(), positions), head_norms, caches[1], metadata
        )
        assert output.shape == (metadata.num_tokens, 6 * HEAD_SIZE)
        assert torch.allclose(output, expected.flatten(1), atol=1e-5)
        assert torch.allclose(caches[0], caches[1], atol=1e-5)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
LAYERS: dict[str, dict[str, Any]] = {
    "no rotation": {"rotates": False},
    "soft cap": {"soft_cap": 2.0},
    "slopes, no rotation": {"rotates": False, "alibi_slopes": alibi_slopes(6)},
    "sinks and a window": {"sinks": SINKS, "sliding_window": 50},
    "chunks": {"chunk": 64},
    "a shared cache": {"shares_kv": True},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_kind_of_layer_equals_the_reference_backend(layer: str):
    options = dict(LAYERS[layer])
    rotates, sinks = options.pop("rotates", True), options.pop("sinks", None)
    params = AttentionParams(num_heads=6, num_kv_heads=2, head_size=HEAD_SIZE, scale=0.125, **options)
    plain = replace(params, shares_kv=False)
    backends = [NativeCpuBackend(NativeRuntime(num_threads=2)), TorchReferenceBackend()]
    caches = [torch.zeros(b.kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, 2, HEAD_SIZE)) for b in backends]
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(400, HEAD_SIZE // 2, generator=generator)
    for step in STEPS:
        metadata = metadata_of(step)
        positions = torch.cat([torch.arange(n - query_len, n) for query_len, n in step])
        rotation = Rotation(angles.cos(), angles.sin(), positions) if rotates else None
        qkv = torch.randn(metadata.num_tokens, 10 * HEAD_SIZE, generator=generator)
        outputs = []
        for backend, cache in zip(backends, caches, strict=True):
            output = backend.forward_fused(plain, qkv.clone(), rotation, None, cache, metadata, sinks)
            if params.shares_kv:
                before, queries = cache.clone(), qkv[:, : 6 * HEAD_SIZE].clone()
                output = backend.forward_fused(params, queries, rotation, None, cache, metadata, sinks)
                assert torch.equal(before, cache)
            outputs.append(output)
        assert torch.allclose(*outputs, atol=1e-5)


def test_it_says_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch):
    assert NativeCpuBackend.unsupported_reasons(params_of(), torch.bfloat16, CPU) == []
    reasons = NativeCpuBackend.unsupported_reasons(params_of(head_size=514), torch.float16, torch.device("cuda"))
    assert [reason.split()[0] for reason in reasons] == ["device", "dtype", "head_size"]
    assert NativeCpuBackend.unsupported_reasons(params_of(head_size=33), torch.float32, CPU)

    def fail() -> None:
        raise NativeLibraryError("the native kernels cannot be loaded")

    monkeypatch.setattr(native_cpu, "load_library", fail)
    [reason] = NativeCpuBackend.unsupported_reasons(params_of(), torch.float32, CPU)
    assert "cannot be loaded" in reason
