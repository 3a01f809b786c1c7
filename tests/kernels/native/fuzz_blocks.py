"""Right calls of the wrappers for weights in block formats, as `fuzz_calls`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.native.block_quant import BLOCK_KERNELS, BlockKernel
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.blocks import random_blocks
from tests.kernels.native.fuzz import Call
from tests.kernels.native.fuzz_inputs import FLOATS, normal, number


def weight_of(rng: random.Random, outputs: int) -> tuple[BlockKernel, int, torch.Tensor]:
    """A format, a number of inputs, and a packed weight."""
    kernel = rng.choice(list(BLOCK_KERNELS.values()))
    inputs = kernel.block_size * rng.choice((1, 2, 3))
    packed = torch.zeros(kernel.packed_shape(outputs, inputs), dtype=torch.uint8)
    blocks = random_blocks(kernel, outputs, inputs, rng.randrange(1000))
    kernel.pack_rows(NativeRuntime("portable"), blocks, packed, 0)
    return kernel, inputs, packed


def block_pack(rng: random.Random) -> Call:
    rows = number(rng)
    kernel, inputs, packed = weight_of(rng, rows + 9)
    args = {"blocks": random_blocks(kernel, rows, inputs), "packed": packed, "first_row": rng.randrange(9)}
    return Call(kernel.pack_rows, args, ("packed",))


def block_product(rng: random.Random) -> Call:
    rows, outputs, dtype = number(rng), number(rng), rng.choice(FLOATS)
    kernel, inputs, packed = weight_of(rng, outputs)
    args = {
        "x": normal(rng, rows, inputs, dtype=dtype),
        "packed": packed,
        "output_size": outputs,
        "bias": rng.choice((None, normal(rng, outputs))),
        "out_dtype": None,
        "out": torch.zeros(rows, outputs, dtype=dtype),
    }
    return Call(kernel.linear, args, ("out",))


def block_gated_product(rng: random.Random) -> Call:
    rows, pairs, dtype = number(rng), 16 * rng.randrange(1, 4), rng.choice(FLOATS)
    kernel, inputs, packed = weight_of(rng, 2 * pairs)
    args = {
        "x": normal(rng, rows, inputs, dtype=dtype),
        "packed": packed,
        "intermediate_size": pairs,
        "bias": rng.choice((None, normal(rng, 2 * pairs))),
    }
    return Call(kernel.gated_linear, args)


def block_gather(rng: random.Random) -> Call:
    rows = number(rng)
    kernel, inputs, packed = weight_of(rng, rows)
    args: dict[str, Any] = {"packed": packed, "input_size": inputs}
    if rng.random() < 0.3:
        return Call(kernel.unpack_rows, {**args, "first_row": 0, "num_rows": rows})
    ids = torch.tensor([rng.randrange(rows) for _ in range(5)], dtype=rng.choice((torch.int32, torch.int64)))
    return Call(kernel.gather_rows, {"ids": ids, **args, "dtype": rng.choice(FLOATS)})


BLOCK_CALLS: dict[str, Callable[[random.Random], Call]] = {
    maker.__name__: maker for maker in (block_pack, block_product, block_gated_product, block_gather)
}
