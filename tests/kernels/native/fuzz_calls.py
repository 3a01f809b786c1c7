"""A right call of every typed wrapper, of random small sizes: what the fuzzer spoils."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.kernels.native import (
    attention,
    elementwise,
    latent,
    linear,
    memory,
    quant,
    sampling,
)
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.fuzz import Call
from tests.kernels.native.fuzz_inputs import FLOATS, normal, number
from tests.kernels.native.fuzz_recurrent import MAKERS as RECURRENT_MAKERS

PORTABLE = NativeRuntime("portable")


def rms_norm(rng: random.Random) -> Call:
    rows, size, dtype = number(rng), number(rng), rng.choice(FLOATS)
    x, weight = normal(rng, rows, size, dtype=dtype), normal(rng, size, dtype=dtype)
    residual = normal(rng, rows, size, dtype=dtype) if rng.random() < 0.6 else None
    out = torch.zeros_like(x) if rng.random() < 0.5 else None
    args = {"x": x, "weight": weight, "eps": 1e-6, "residual": residual, "out": out}
    return Call(elementwise.rms_norm, args, ("residual", "out"))


def layer_norm(rng: random.Random) -> Call:
    call = rms_norm(rng)
    size = call.args["x"].shape[1]
    bias = normal(rng, size, dtype=call.args["x"].dtype) if rng.random() < 0.5 else None
    return Call(elementwise.layer_norm, {**call.args, "bias": bias}, ("residual", "out"))


def gated(rng: random.Random) -> Call:
    rows, size, dtype = number(rng), number(rng), rng.choice(FLOATS)
    out = torch.zeros(rows, size, dtype=dtype) if rng.random() < 0.5 else None
    function = rng.choice((elementwise.silu_and_mul, elementwise.gelu_and_mul, elementwise.clamped_silu_and_mul))
    args: dict[str, Any] = {"x": normal(rng, rows, 2 * size, dtype=dtype), "out": out}
    if function is elementwise.clamped_silu_and_mul:
        args.update(limit=1.5, alpha=1.7, offset=1.0)
    return Call(function, args, ("out",))


def activated(rng: random.Random) -> Call:
    rows, size, dtype = number(rng), number(rng), rng.choice(FLOATS)
    function, activation = (
        rng.choice((elementwise.activate_and_mul, elementwise.transform)),
        rng.choice(("relu2", "none")),
    )
    args = {"x": normal(rng, rows, 2 * size, dtype=dtype), "out": None}
    if function is elementwise.transform:
        addend = rng.choice((None, normal(rng, rows, 2 * size, dtype=dtype)))
        args = {**args, "factor": rng.choice((1.0, 0.3)), "addend": addend}
        args["out"] = rng.choice((None, torch.zeros(rows, 2 * size, dtype=dtype)))

    def call(runtime: NativeRuntime, **given: Any) -> Any:
        return function(runtime, activation=activation, **given)

    call.__name__ = function.__name__
    return Call(call, args, ("out",))


def is_finite(rng: random.Random) -> Call:
    dtype = rng.choice((*FLOATS, torch.float16))
    return Call(elementwise.is_finite, {"tensor": normal(rng, number(rng), number(rng), dtype=dtype)})


def packed_weight(rng: random.Random, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    packed = torch.zeros(linear.packed_shape(outputs, inputs, dtype), dtype=dtype)
    linear.pack_rows(PORTABLE, normal(rng, outputs, inputs), packed, 0)
    return packed


def product(rng: random.Random) -> Call:
    rows, inputs, outputs, dtype = number(rng), number(rng), number(rng), rng.choice(FLOATS)
    args = {
        "x": normal(rng, rows, inputs, dtype=dtype),
        "packed": packed_weight(rng, outputs, inputs, dtype),
        "output_size": outputs,
        "bias": normal(rng, outputs) if rng.random() < 0.5 else None,
        "out_dtype": rng.choice((None, dtype, torch.float32)),
    }
    if rng.random() < 0.5:
        args["out"] = torch.zeros(rows, outputs, dtype=args["out_dtype"] or dtype)
    return Call(linear.linear, args, ("out",) if "out" in args else ())


def gated_product(rng: random.Random) -> Call:
    rows, inputs, size, dtype = number(rng), number(rng), 16 * rng.randrange(1, 3), rng.choice(FLOATS)
    args = {
        "x": normal(rng, rows, inputs, dtype=dtype),
        "packed": packed_weight(rng, 2 * size, inputs, dtype),
        "intermediate_size": size,
        "bias": normal(rng, 2 * size) if rng.random() < 0.5 else None,
        "out": torch.zeros(rows, size, dtype=dtype),
    }
    return Call(linear.gated_linear, args, ("out",))


def pack(rng: random.Random) -> Call:
    rows, inputs, dtype = number(rng), number(rng), rng.choice(FLOATS)
    packed = torch.zeros(linear.packed_shape(rows + 20, inputs, dtype), dtype=dtype)
    first = rng.randrange(20)
    return Call(
        linear.pack_rows, {"rows": normal(rng, rows, inputs), "packed": packed, "first_row": first}, ("packed",)
    )


def unpack(rng: random.Random) -> Call:
    rows, inputs = number(rng), number(rng)
    args = {"packed": packed_weight(rng, rows, inputs, rng.choice(FLOATS)), "input_size": inputs, "first_row": 0}
    return Call(linear.unpack_rows, {**args, "num_rows": rows})


def gather(rng: random.Random) -> Call:
    rows, inputs = number(rng), number(rng)
    ids = torch.tensor([rng.randrange(rows) for _ in range(7)], dtype=rng.choice((torch.int32, torch.int64)))
    packed = packed_weight(rng, rows, inputs, rng.choice(FLOATS))
    return Call(linear.gather_rows, {"ids": ids, "packed": packed, "input_size": inputs})


def quantised(rng: random.Random, outputs: int, inputs: int) -> tuple[quant.QuantFormat, dict[str, Any]]:
    """A format, and empty weights and scales of it."""
    format = rng.choice((quant.INT8, quant.INT4))
    packed = torch.zeros(format.packed_shape(outputs, inputs), dtype=torch.int8)
    return format, {
        "packed": packed,
        "scales": torch.zeros(format.scales_shape(outputs, inputs)).to(format.scale_dtype),
    }


def filled(rng: random.Random, outputs: int, inputs: int) -> tuple[quant.QuantFormat, dict[str, Any]]:
    format, weights = quantised(rng, outputs, inputs)
    format.pack_rows(PORTABLE, normal(rng, outputs, inputs), weights["packed"], weights["scales"], 0)
    return format, weights


def quant_pack(rng: random.Random) -> Call:
    rows, inputs = number(rng), number(rng)
    format, weights = quantised(rng, rows + 9, inputs)
    args = {"rows": normal(rng, rows, inputs), **weights, "first_row": rng.randrange(9)}
    return Call(format.pack_rows, args, ("packed", "scales"))


def quant_product(rng: random.Random) -> Call:
    rows, inputs, outputs, dtype = number(rng), number(rng), number(rng), rng.choice(FLOATS)
    format, weights = filled(rng, outputs, inputs)
    bias = normal(rng, outputs) if rng.random() < 0.5 else None
    args = {"x": normal(rng, rows, inputs, dtype=dtype), **weights, "output_size": outputs, "bias": bias}
    return Call(format.linear, {**args, "out_dtype": None})


def quant_gated_product(rng: random.Random) -> Call:
    rows, inputs, pairs, dtype = number(rng), number(rng), 16 * rng.randrange(1, 4), rng.choice(FLOATS)
    format, weights = filled(rng, 2 * pairs, inputs)
    bias = normal(rng, 2 * pairs) if rng.random() < 0.5 else None
    args = {"x": normal(rng, rows, inputs, dtype=dtype), **weights, "intermediate_size": pairs, "bias": bias}
    return Call(format.gated_linear, args)


def quant_gather(rng: random.Random) -> Call:
    rows, inputs = number(rng), number(rng)
    format, weights = filled(rng, rows, inputs)
    if rng.random() < 0.3:
        return Call(format.unpack_rows, {**weights, "input_size": inputs, "first_row": 0, "num_rows": rows})
    ids = torch.tensor([rng.randrange(rows) for _ in range(5)], dtype=rng.choice((torch.int32, torch.int64)))
    args = {"ids": ids, **weights, "input_size": inputs, "dtype": rng.choice(FLOATS)}
    return Call(format.gather_rows, args)


def cache_of(rng: random.Random, blocks: int, heads: int, block_size: int, head_size: int) -> torch.Tensor:
    return normal(rng, blocks, heads, 2, block_size * head_size, dtype=rng.choice(FLOATS))


def paged_attention(rng: random.Random) -> Call:
    kv_heads, head_size, block_size, blocks = rng.choice((1, 2)), rng.choice((2, 16, 34)), rng.choice((16, 48)), 9
    heads = kv_heads * rng.choice((1, 3))
    cache = cache_of(rng, blocks, kv_heads, block_size, head_size)
    lens = [rng.choice((1, 5, 16, 33)) for _ in range(rng.randrange(4))]
    queries = [rng.randrange(min(length, 6) + 1) for length in lens]
    starts = torch.tensor([0, *np.cumsum(queries).tolist()], dtype=torch.int32)
    tokens = int(starts[-1]) + rng.randrange(2)
    args = {
        "query": normal(rng, tokens, heads, head_size, dtype=cache.dtype),
        "kv_cache": cache,
        "block_table": torch.tensor([[rng.randrange(blocks) for _ in range(3)] for _ in lens], dtype=torch.int32),
        "query_start_loc": starts,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": 0.2,
        "sliding_window": rng.choice((None, 3)),
        "chunk": rng.choice((None, 4)),
        "soft_cap": rng.choice((0.0, 2.0)),
        "sinks": rng.choice((None, normal(rng, heads))),
        "alibi_slopes": rng.choice((None, normal(rng, heads))),
        "out": torch.zeros(tokens, heads, head_size, dtype=cache.dtype),
    }
    args["block_table"] = args["block_table"].view(len(lens), 3)
    return Call(attention.paged_attention, args, ("out",))


def slots_of(rng: random.Random, tokens: int, num_slots: int) -> torch.Tensor:
    return torch.tensor([slot if rng.random() < 0.9 else -1 for slot in rng.sample(range(num_slots), tokens)])


def rope_and_cache(rng: random.Random) -> Call:
    heads, kv_heads, head_size, block_size = rng.choice((1, 4)), rng.choice((1, 2)), rng.choice((2, 16, 34)), 16
    cache = cache_of(rng, 3, kv_heads, block_size, head_size)
    tokens, half = rng.randrange(9), rng.randrange(head_size // 2 + 1)
    is_centered = rng.random() < 0.3
    gains = (heads * head_size, kv_heads * head_size) if is_centered else (head_size, head_size)
    norms = [rng.choice((None, normal(rng, size, dtype=cache.dtype))) for size in gains]
    args = {
        "qkv": normal(rng, tokens, (heads + 2 * kv_heads) * head_size, dtype=cache.dtype),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "cos": normal(rng, 11, half),
        "sin": normal(rng, 11, half),
        "positions": torch.tensor([rng.randrange(11) for _ in range(tokens)], dtype=torch.int64),
        "slot_mapping": slots_of(rng, tokens, 3 * block_size).long(),
        "kv_cache": cache,
        "block_size": block_size,
        "q_norm": norms[0],
        "k_norm": norms[1],
        "eps": 1e-6,
        "v_norm": rng.choice((None, normal(rng, head_size, dtype=cache.dtype))),
        "norms_last": not is_centered and rng.random() < 0.5,
        "query_scales": rng.choice((None, normal(rng, 11))),
        "norms_centered": is_centered,
        "limit": rng.choice((0.0, 0.5)),
    }
    return Call(attention.rope_and_cache, args, ("qkv", "kv_cache"))


def reshape_and_cache(rng: random.Random) -> Call:
    kv_heads, head_size, tokens = rng.choice((1, 2)), rng.choice((2, 16, 34)), rng.randrange(9)
    cache = cache_of(rng, 3, kv_heads, 16, head_size)
    key, value = (normal(rng, tokens, kv_heads, head_size, dtype=cache.dtype) for _ in range(2))
    args = {"key": key, "value": value, "kv_cache": cache, "slot_mapping": slots_of(rng, tokens, 48).long()}
    return Call(attention.reshape_and_cache, args, ("kv_cache",))


def copy_pages(rng: random.Random) -> Call:
    cache = cache_of(rng, 8, 2, 16, 2)
    pages, count = rng.sample(range(8), 8), rng.randrange(5)
    args = {"kv_cache": cache, "src_ids": torch.tensor(pages[:count]).long()}
    return Call(attention.copy_pages, {**args, "dst_ids": torch.tensor(pages[4 : 4 + count]).long()}, ("kv_cache",))


def latent_attention(rng: random.Random) -> Call:
    heads, latent_size, rope_size, block_size = rng.choice((1, 5)), rng.choice((2, 34)), rng.choice((2, 16)), 16
    dtype, tokens, seq_len = rng.choice(FLOATS), rng.randrange(1, 4), rng.randrange(3, 40)
    width = latent_size + rope_size
    args = {
        "query": normal(rng, tokens, heads, width, dtype=dtype),
        "latent_cache": normal(rng, 4, block_size, width, dtype=dtype),
        "latent_size": latent_size,
        "block_table": torch.tensor([rng.sample(range(4), 3)], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32),
        "scale": 0.3,
        "out": torch.zeros(tokens, heads, latent_size, dtype=dtype),
    }
    return Call(latent.latent_attention, args, ("out",))


def write_latent_tokens(rng: random.Random) -> Call:
    heads, latent_size, half, nope = rng.choice((1, 3)), 34, rng.choice((1, 8, 17)), number(rng)
    dtype, tokens = rng.choice(FLOATS), rng.randrange(9)
    width = latent_size + 2 * half
    args = {
        "query": normal(rng, tokens, heads, nope + 2 * half, dtype=dtype),
        "rotated": normal(rng, tokens, heads, width, dtype=dtype),
        "latent": normal(rng, tokens, width, dtype=dtype),
        "norm": normal(rng, latent_size, dtype=dtype),
        "eps": 1e-6,
        "cos": normal(rng, 11, half),
        "sin": normal(rng, 11, half),
        "positions": torch.tensor([rng.randrange(11) for _ in range(tokens)], dtype=torch.int64),
        "slot_mapping": slots_of(rng, tokens, 48).long(),
        "latent_cache": normal(rng, 3, 16, width, dtype=dtype),
    }
    return Call(latent.write_latent_tokens, args, ("rotated", "latent_cache"))


def head_linear(rng: random.Random) -> Call:
    tokens, heads, inputs, outputs, dtype = (
        number(rng),
        rng.choice((1, 3)),
        number(rng),
        number(rng),
        rng.choice(FLOATS),
    )
    args = {
        "x": normal(rng, tokens, heads, inputs, dtype=dtype),
        "packed": torch.stack([packed_weight(rng, outputs, inputs, dtype) for _ in range(heads)]),
        "output_size": outputs,
        "out": rng.choice((None, torch.zeros(tokens, heads, outputs, dtype=dtype))),
    }
    return Call(latent.head_linear, args, ("out",))


def argmax(rng: random.Random) -> Call:
    return Call(sampling.argmax, {"logits": normal(rng, number(rng), number(rng))})


def uniforms(rng: random.Random) -> Call:
    seeds, positions = (np.array([rng.getrandbits(64) for _ in range(5)], np.uint64) for _ in range(2))
    return Call(sampling.uniforms, {"seeds": seeds, "positions": positions, "stream": rng.randrange(4)})


def sample(rng: random.Random) -> Call:
    lines = rng.randrange(1, 6)
    args = {
        "logits": normal(rng, lines, rng.choice((1, 17, 300))) * 4,
        "temperature": np.array([rng.choice((0.0, 0.7, 2.0)) for _ in range(lines)], np.float32),
        "top_k": np.array([rng.choice((0, 0, 3, 500)) for _ in range(lines)], np.int32),
        "top_p": np.array([rng.choice((1.0, 0.9, 0.1)) for _ in range(lines)]),
        "log_min_p": np.array([rng.choice((-np.inf, -2.0)) for _ in range(lines)], np.float32),
        "uniforms": np.array([rng.random() for _ in range(lines)]),
    }

    def function(runtime: NativeRuntime, logits: torch.Tensor, **columns: Any) -> Any:
        return sampling.sample(runtime, logits, sampling.DrawParams(**columns))

    function.__name__ = "sample"
    return Call(function, args)


def penalties(rng: random.Random) -> Call:
    lines, vocab = number(rng), number(rng)
    entries = rng.randrange(1, min(lines, 4) + 1)
    ids = [rng.sample(range(vocab), rng.randrange(vocab + 1)) for _ in range(entries)]
    starts = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    args = {
        "logits": normal(rng, lines, vocab),
        "lines": np.array(rng.sample(range(lines), entries), np.int32),
        "starts": starts,
        "token_ids": np.array([token for line in ids for token in line], np.int64),
        "counts": np.ones(int(starts[-1]), np.float32),
        "strengths": np.full((entries, 3), 1.5, np.float32),
    }
    return Call(sampling.apply_penalties_inplace, args, ("logits",))


def bitmask(rng: random.Random) -> Call:
    lines, vocab = number(rng), rng.choice((1, 31, 33, 70))
    count = rng.randrange(1, lines + 1)
    masks = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=torch.int64).int()
    args = {"logits": normal(rng, lines, vocab), "bitmask": masks, "lines": np.array(rng.sample(range(lines), count))}
    args["lines"] = args["lines"].astype(np.int32)
    return Call(sampling.apply_bitmask_inplace, args, ("logits",))


def logprobs(rng: random.Random) -> Call:
    lines, vocab = number(rng), rng.choice((1, 31, 300))
    args = {
        "logits": normal(rng, lines, vocab),
        "token_ids": np.array([rng.randrange(vocab) for _ in range(lines)], np.int32),
        "num_top": np.array([rng.randrange(min(vocab, 7) + 1) for _ in range(lines)], np.int32),
        "is_logits": rng.random() < 0.5,
    }
    return Call(sampling.logprobs, args)


def huge_zeros(rng: random.Random) -> Call:
    def function(runtime: NativeRuntime, rows: Any, columns: Any, dtype: Any) -> Any:
        made = memory.huge_zeros((rows, columns), dtype)
        return made.flatten()[:9].clone(), tuple(made.shape)  # pages that nobody reads are not taken

    function.__name__ = "huge_zeros"
    return Call(function, {"rows": rng.randrange(5), "columns": rng.choice((3, 1 << 47)), "dtype": rng.choice(FLOATS)})


def checksum(rng: random.Random) -> Call:
    return Call(memory.checksum, {"tensor": normal(rng, number(rng), number(rng), dtype=rng.choice(FLOATS))})


CALLS: dict[str, Callable[[random.Random], Call]] = {
    maker.__name__: maker
    for maker in (
        rms_norm, layer_norm, gated, activated, is_finite, product, gated_product, pack, unpack, gather, quant_pack,
        quant_product, quant_gated_product, quant_gather, paged_attention, rope_and_cache, reshape_and_cache,
        copy_pages, argmax, uniforms, sample, penalties, bitmask, logprobs, huge_zeros, checksum, latent_attention,
        write_latent_tokens, head_linear, *RECURRENT_MAKERS,
    )
}  # fmt: skip
