"""Every attention backend against the reference kernel, over mixes of prompt chunks and decodes.

Tolerances: one rounding of the output (2**-8 bf16, 2**-11 f16) plus one of the softmax weights, on outputs that are
averages of values below 4; float32 sums of at most 100 terms stay below 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from quire.attention import decode_tiles
from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.backends import torch_reference
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.metadata import AttentionMetadata
from quire.config.alibi import alibi_slopes
from quire.kernels.reference.attention import paged_attention
from tests.models.stepping import make_metadata

BACKENDS = {"torch_reference": TorchReferenceBackend}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
NUM_BLOCKS = 64
# (query_len, seq_len) of each request.
BATCHES = {
    "no requests": [],
    "one token": [(1, 1)],
    "decodes at page edges": [(1, n) for n in (1, 3, 4, 5, 8, 13, 37, 40, 41)],
    "long and short decodes": [(1, 90), (1, 2), (1, 60), (1, 7)],
    "whole prompts": [(2, 2), (4, 4), (5, 5), (13, 13)],
    "later chunks": [(2, 9), (4, 8), (7, 40), (16, 17)],
    "a mix": [(1, 17), (5, 5), (1, 4), (9, 31), (1, 33), (3, 4)],
}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@dataclass
class Case:
    """A step's inputs; slots that no request has written hold NaN."""

    params: AttentionParams
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    sinks: torch.Tensor | None = None

    def expected(self) -> torch.Tensor:
        """The reference kernel's output for the cache after the step."""
        metadata, params = self.metadata, self.params
        table, starts, lens = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        key_cache, value_cache = self.kv_cache
        slopes = None if params.alibi_slopes is None else torch.tensor(params.alibi_slopes)
        return paged_attention(
            self.query, key_cache, value_cache, table, starts, lens, params.scale, params.sliding_window,
            chunk=params.chunk, soft_cap=params.soft_cap, sinks=self.sinks, alibi_slopes=slopes,
        )  # fmt: skip

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.forward(self.params, self.query, self.key, self.value, self.kv_cache, self.metadata, self.sinks)


def make_case(
    batch: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 8,
    block_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(NUM_BLOCKS * 4 - 1, generator=generator).add(1).tolist()
    pages = [[free.pop() for _ in range(-(-seq_len // block_size))] for _, seq_len in batch]
    metadata = make_metadata([n for n, _ in batch], [n for _, n in batch], pages, block_size, device)
    num_tokens = metadata.num_tokens
    shape = TorchReferenceBackend.kv_cache_shape(NUM_BLOCKS * 4, block_size, num_kv_heads, head_size)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype)
    for (query_len, seq_len), page_list in zip(batch, pages, strict=True):
        for position in range(seq_len - query_len):
            slot = kv_cache[:, page_list[position // block_size], position % block_size]
            slot.copy_(torch.randn(slot.shape, generator=generator))
    query = torch.randn(num_tokens, num_heads, head_size, generator=generator)
    fused = torch.randn(num_tokens, 2, num_kv_heads, head_size, generator=generator).to(device, dtype)
    params = AttentionParams(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=0.4, sliding_window=window,
        **options,
    )  # fmt: skip
    return Case(params, metadata, query.to(device, dtype), fused[:, 0], fused[:, 1], kv_cache.to(device), sinks)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tolerance = TOLERANCES[actual.dtype]
    difference = (actual.float() - expected.float()).abs()
    assert bool((difference <= tolerance).all()), f"off by {difference.max().item()}, allowed {tolerance}"


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 4, 6, 50], ids="window {}".format)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_any_mix_of_chunks_and_decodes_matches_the_reference(backend, batch, window: int | None, device: str):
    case = make_case(batch, window=window, device=device)
    assert_close(case.run(backend()), case.expected())


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(1, 1, 16, 1), (4, 4, 8, 4), (6, 2, 20, 16), (8, 1, 32, 5), (7, 7, 2, 3)],
    ids=["one head", "as many key heads", "groups of three", "one key head", "odd sizes"],
)
def test_head_layouts_and_types_match_the_reference(
    backend, dtype, num_heads, num_kv_heads, head_size, block_size, device: str
):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "block_size": block_size}
    case = make_case(BATCHES["a mix"], dtype=dtype, device=device, **sizes)
    assert_close(case.run(backend()), case.expected())


OPTIONS: dict[str, dict[str, Any]] = {
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "slopes": {"alibi_slopes": alibi_slopes(4)},
    "chunks of 7": {"chunk": 7},
    "all of them": {
        "window": 6, "soft_cap": 3.0, "alibi_slopes": alibi_slopes(4), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])
    },
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_a_layer_does_with_scores_matches_the_reference(backend, option: str, dtype: torch.dtype):
    for batch in ([(1, 17), (5, 5), (1, 4), (9, 31), (1, 33), (3, 4)], [(40, 40), (1, 41)]):
        case = make_case(batch, dtype=dtype, **OPTIONS[option])
        assert_close(case.run(backend()), case.expected())


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_layer_that_shares_a_cache_reads_it_and_writes_nothing(backend):
    case = make_case(BATCHES["a mix"])
    instance = backend()
    expected, written = case.run(instance), case.kv_cache.clone()
    params = replace(case.params, shares_kv=True)
    output = instance.forward(params, case.query, None, None, case.kv_cache, case.metadata)
    assert_close(output, expected)
    assert torch.equal(written.nan_to_num(9.0), case.kv_cache.nan_to_num(9.0))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_only_the_given_slots_are_written(backend):
    case = make_case(BATCHES["a mix"])
    before = case.kv_cache.clone()
    inputs = [tensor.clone() for tensor in (case.query, case.key, case.value)]
    case.run(backend())
    slots = case.metadata.slot_mapping
    after = case.kv_cache.flatten(1, 2)
    assert torch.equal(after[0, slots], case.key) and torch.equal(after[1, slots], case.value)
    untouched = torch.ones(after.shape[1], dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(after[:, untouched].nan_to_num(99.0), before.flatten(1, 2)[:, untouched].nan_to_num(99.0))
    assert all(torch.equal(a, b) for a, b in zip(inputs, (case.query, case.key, case.value), strict=True))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_the_same_inputs_give_the_same_bits_again(backend):
    case, instance = make_case(BATCHES["a mix"]), backend()
    assert torch.equal(case.run(instance), case.run(instance))
    assert torch.equal(case.run(instance), case.run(backend()))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_extreme_scores_do_not_overflow(backend):
    case = make_case([(1, 9), (4, 4), (3, 8)])
    case.query *= 1e4
    assert_close(case.run(backend()), case.expected())


def test_one_instance_serves_layers_of_different_windows_and_steps_of_different_requests():
    backend = TorchReferenceBackend()
    for batch in [*BATCHES.values()] * 2:
        for window in (None, 6):
            case = make_case(batch, window=window)
            assert_close(case.run(backend), case.expected())


def test_padding_rows_of_the_query_come_back_as_zeros():
    case = make_case([(1, 5), (3, 3)])
    padded = torch.cat((case.query, torch.full((2, 4, 8), float("nan"))))
    keys = torch.cat((case.key, torch.full((2, 2, 8), float("nan"))))
    output = TorchReferenceBackend().forward(case.params, padded, keys, keys, case.kv_cache, case.metadata)
    assert bool((output[4:] == 0).all()) and not bool(output[:4].isnan().any())


@pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
def test_small_memory_limits_change_the_work_but_not_the_result(monkeypatch: pytest.MonkeyPatch, window: int | None):
    monkeypatch.setattr(torch_reference, "MAX_TILE_BYTES", 1500)
    monkeypatch.setattr(torch_reference, "MAX_MASK_BYTES", 1)
    monkeypatch.setattr(decode_tiles, "SHORT_PAGES", 1)
    for batch in ([(1, n) for n in range(1, 60, 4)], [(70, 90), (1, 90), (50, 50)]):
        case = make_case(batch, window=window)
        assert_close(case.run(TorchReferenceBackend()), case.expected())
