"""Gated DeltaNet and short convolutions: native kernels compute what plain ones do, and any cut of a prompt alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.recurrent_arch import GatedDeltaNetArch, ShortConvArch
from quire.core.kv_spec import MambaSpec
from quire.core.scheduler_output import StateBlocks
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.gated_delta_net import GatedDeltaNet
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels
from quire.layers.options import LayerOptions
from quire.layers.short_conv import ShortConv
from quire.worker.attention_groups import make_state_metadata

ARCH = GatedDeltaNetArch(num_key_heads=2, num_value_heads=4, key_size=16, value_size=32, conv_size=4)
CHANNELS = 24
NUM_BLOCKS = 5
LENGTHS = (1, 9, 4)
INPUTS = {
    GatedDeltaNet: [ARCH.conv_width, 4 * 32, 4, 4],
    ShortConv: [3 * CHANNELS],
}


def native(dtype: torch.dtype) -> NativeKernels:
    return NativeKernels(NativeRuntime("auto", num_threads=2), dtype)


def build(kind: type[nn.Module], kernels: LayerKernels, dtype: torch.dtype) -> Any:
    """A layer with random weights, the same for all kernels."""
    options = LayerOptions(dtype, torch.device("cpu"), kernels)
    layer = (
        GatedDeltaNet(ARCH, 0, options=options)
        if kind is GatedDeltaNet
        else ShortConv(CHANNELS, ShortConvArch(conv_size=3, has_bias=True), 0, options=options)
    )
    generator = torch.Generator().manual_seed(0)
    for _, target in layer.targets("layer"):
        assert target.load(torch.randn(target.shape, generator=generator))
    return layer


def cache_of(layer: Any) -> torch.Tensor:
    """Blocks that hold what their last users left."""
    spec = layer.kv_cache_spec(16)
    assert isinstance(spec, MambaSpec)
    return torch.full((NUM_BLOCKS, spec.page_size_bytes), 0x3C, dtype=torch.uint8)


def rows_of(kind: type[nn.Module], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(LENGTHS), width, generator=generator).to(dtype) for width in INPUTS[kind]]


def step(layer: Any, cache: torch.Tensor, rows: Sequence[torch.Tensor], done: Sequence[int], counts: Sequence[int]):
    """Some tokens of each request, whose state is in block i + 1 and moves to block 4 - i and back."""
    starts = np.array([0, *np.cumsum(counts)], dtype=np.int32)
    blocks = np.arange(1, len(counts) + 1, dtype=np.int32)
    computed = np.array(done, dtype=np.int32)
    read = np.where(computed > 0, blocks, -1).astype(np.int32)
    metadata = make_state_metadata(starts, computed, StateBlocks(read, blocks), torch.device("cpu"))
    return layer(*rows, context=ForwardContext((metadata,), (cache,)))


def run(layer: Any, rows: Sequence[torch.Tensor], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All prompts in chunks, side by side: (results, cache)."""
    cache, firsts, results = cache_of(layer), np.cumsum([0, *LENGTHS]), {}
    for done in range(0, max(LENGTHS), chunk):
        active = [i for i, length in enumerate(LENGTHS) if length > done]
        counts = [min(chunk, LENGTHS[i] - done) if i in active else 0 for i in range(len(LENGTHS))]
        tokens = [int(firsts[i]) + done + j for i in active for j in range(counts[i])]
        out = step(layer, cache, [tensor[tokens] for tensor in rows], [done] * len(LENGTHS), counts)
        results.update(zip(tokens, out, strict=True))
    return torch.stack([results[token] for token in range(sum(LENGTHS))]), cache


@pytest.mark.parametrize("kind", INPUTS)
def test_native_kernels_compute_what_plain_ones_do(kind: type[nn.Module]):
    rows = rows_of(kind, torch.float32)
    (actual, states), (expected, plain) = (
        run(build(kind, kernels, torch.float32), rows, 16) for kernels in (native(torch.float32), TorchKernels())
    )
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.view(torch.float32), plain.view(torch.float32), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_prompts_give_the_same_bits_however_they_are_cut(kind: type[nn.Module], dtype: torch.dtype):
    layer, rows = build(kind, native(dtype), dtype), rows_of(kind, dtype)
    whole, states = run(layer, rows, 16)
    for chunk in (1, 2, 7):
        out, cut = run(layer, rows, chunk)
        assert torch.equal(out, whole) and torch.equal(cut, states)


@pytest.mark.parametrize("kind", INPUTS)
def test_weights_are_kept_as_the_checkpoint_has_them(kind: type[nn.Module]):
    targets = dict(build(kind, TorchKernels(), torch.float32).targets("layer"))
    for target in targets.values():
        assert target.stored().shape == target.shape
    conv = "layer.conv1d.weight" if kind is GatedDeltaNet else "layer.conv.weight"
    assert targets[conv].shape == ((ARCH.conv_width, 1, 4) if kind is GatedDeltaNet else (CHANNELS, 1, 3))
