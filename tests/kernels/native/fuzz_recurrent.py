"""A right call of every wrapper that recurrent layers use, of random small sizes: as `fuzz_calls`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.kernels.native import causal_conv, delta_net, elementwise, state_space
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.state_layout import in_lanes, mamba_state_shape
from tests.kernels.native.fuzz import Call
from tests.kernels.native.fuzz_inputs import FLOATS, normal, number


def recurrent_batch(rng: random.Random, num_blocks: int) -> dict[str, torch.Tensor]:
    """Up to three requests, new ones and others; each state stays in its block or moves to one that is free.

    Where a block is left, the state after a token is kept in it.
    """
    counts = [rng.choice((1, 1, 2, 5)) for _ in range(rng.randrange(4))]
    *blocks, spare = rng.sample(range(num_blocks), 2 * len(counts) + 1)
    kept = [-1] * sum(counts)
    if counts and counts[-1] > 1:
        kept[-2] = spare
    columns = {
        "query_start_loc": [0, *np.cumsum(counts).tolist()],
        "read_blocks": [rng.choice((-1, block)) for block in blocks[: len(counts)]],
        "write_blocks": blocks[rng.choice((0, len(counts))) :][: len(counts)],
        "token_blocks": kept,
    }
    return {name: torch.tensor(column, dtype=torch.int32) for name, column in columns.items()}


def recurrent(function: Callable[..., Any], args: dict[str, Any], written: tuple[str, ...]) -> Call:
    """A call whose batch is spoilt part by part."""
    names = ("query_start_loc", "read_blocks", "write_blocks", "token_blocks")

    def call(runtime: NativeRuntime, **given: Any) -> Any:
        batch = RecurrentBatch(**{name: given.pop(name) for name in names})
        return function(runtime, batch=batch, **given)

    call.__name__ = function.__name__
    return Call(call, args, written)


def convolution(rng: random.Random) -> Call:
    channels, conv_size, dtype = number(rng), rng.choice((2, 3, 4)), rng.choice(FLOATS)
    batch = recurrent_batch(rng, 7)
    tokens = int(batch["query_start_loc"][-1])
    args = {
        **batch,
        "x": normal(rng, tokens, channels, dtype=dtype),
        "weight": normal(rng, conv_size, channels, dtype=dtype),
        "bias": rng.choice((None, normal(rng, channels, dtype=dtype))),
        "states": normal(rng, 7, conv_size - 1, channels, dtype=dtype),
        "has_silu": rng.random() < 0.5,
        "out": rng.choice((None, torch.zeros(tokens, channels, dtype=dtype))),
    }
    return recurrent(causal_conv.causal_conv, args, ("states", "out"))


def mamba_scan(rng: random.Random) -> Call:
    channels, columns, dtype = number(rng), rng.choice((1, 3, 16)), rng.choice(FLOATS)
    batch = recurrent_batch(rng, 7)
    tokens = int(batch["query_start_loc"][-1])
    args = {
        **batch,
        "x": normal(rng, tokens, channels, dtype=dtype),
        "time_step": normal(rng, tokens, channels, dtype=dtype),
        "b": normal(rng, tokens, columns, dtype=dtype),
        "c": normal(rng, tokens, columns, dtype=dtype),
        "gate": rng.choice((None, normal(rng, tokens, channels, dtype=dtype))),
        "a": in_lanes(-normal(rng, channels, columns).exp()),
        "skip": normal(rng, channels),
        "states": normal(rng, 7, *mamba_state_shape(channels, columns)),
        "out": rng.choice((None, torch.zeros(tokens, channels, dtype=dtype))),
    }
    return recurrent(state_space.mamba_scan, args, ("states", "out"))


def mamba2_scan(rng: random.Random) -> Call:
    groups, head_size, columns, dtype = rng.choice((1, 2)), number(rng), rng.choice((1, 3, 16)), rng.choice(FLOATS)
    heads = groups * rng.choice((1, 3))
    batch = recurrent_batch(rng, 7)
    tokens = int(batch["query_start_loc"][-1])
    args = {
        **batch,
        "x": normal(rng, tokens, heads * head_size, dtype=dtype),
        "time_step": normal(rng, tokens, heads, dtype=dtype),
        "b": normal(rng, tokens, groups * columns, dtype=dtype),
        "c": normal(rng, tokens, groups * columns, dtype=dtype),
        "gate": rng.choice((None, normal(rng, tokens, heads * head_size, dtype=dtype))),
        **{name: normal(rng, heads) for name in ("a", "skip", "time_step_bias")},
        "states": normal(rng, 7, heads, columns, head_size),
        "num_groups": groups,
        "time_step_range": rng.choice(((0.0, float("inf")), (0.1, 0.9))),
        "out": rng.choice((None, torch.zeros(tokens, heads * head_size, dtype=dtype))),
    }
    return recurrent(state_space.mamba2_scan, args, ("states", "out"))


def delta_gates(rng: random.Random) -> Call:
    rows, heads, dtype = number(rng), number(rng), rng.choice(FLOATS)
    args = {name: normal(rng, rows, heads, dtype=dtype) for name in ("b", "a")}
    return Call(delta_net.delta_gates, {**args, "a_log": normal(rng, heads), "bias": normal(rng, heads)})


def delta_rule(rng: random.Random) -> Call:
    key_heads, key_size, dtype = rng.choice((1, 2)), rng.choice((1, 8, 17)), rng.choice(FLOATS)
    value_heads, value_size = key_heads * rng.choice((1, 2)), 16 * rng.choice((1, 2, 5))
    batch = recurrent_batch(rng, 7)
    tokens = int(batch["query_start_loc"][-1])
    args = {
        **batch,
        "qkv": normal(rng, tokens, 2 * key_heads * key_size + value_heads * value_size, dtype=dtype),
        "decay": normal(rng, tokens, value_heads).sigmoid(),
        "beta": normal(rng, tokens, value_heads).sigmoid(),
        "states": normal(rng, 7, value_heads, key_size, value_size),
        "num_key_heads": key_heads,
        "scale": 0.5,
        "out": rng.choice((None, torch.zeros(tokens, value_heads * value_size, dtype=dtype))),
    }
    return recurrent(delta_net.gated_delta_rule, args, ("states", "out"))


def gated_norm(rng: random.Random) -> Call:
    rows, size, groups, dtype = number(rng), number(rng), rng.choice((1, 3)), rng.choice(FLOATS)
    args = {
        "x": normal(rng, rows, groups * size, dtype=dtype),
        "gate": normal(rng, rows, groups * size, dtype=dtype),
        "weight": normal(rng, rng.choice((1, groups)) * size, dtype=dtype),
        "eps": 1e-6,
        "num_groups": groups,
        "gate_first": rng.random() < 0.5,
        "out": rng.choice((None, torch.zeros(rows, groups * size, dtype=dtype))),
    }
    return Call(elementwise.gated_rms_norm, args, ("out",))


def multiplied(rng: random.Random) -> Call:
    rows, size, dtype = number(rng), number(rng), rng.choice(FLOATS)
    out = torch.zeros(rows, size, dtype=dtype) if rng.random() < 0.5 else None
    x, gate = normal(rng, rows, size, dtype=dtype), normal(rng, *rng.choice(((rows, size), (size,))), dtype=dtype)
    return Call(elementwise.multiply, {"x": x, "gate": gate, "out": out}, ("out",))


MAKERS = (convolution, mamba_scan, mamba2_scan, delta_gates, delta_rule, gated_norm, multiplied)
