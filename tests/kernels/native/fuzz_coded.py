"""Right calls of the wrappers for coded weights, as `fuzz_calls`."""

from __future__ import annotations

import random
from typing import Any

import torch

from quire.kernels.native import coded, experts
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.fuzz import Call
from tests.kernels.native.fuzz_calls import PORTABLE, normal, number
from tests.kernels.native.fuzz_expert_calls import routing_of

BF16 = torch.bfloat16
Parts = dict[str, Any]


def rows_of(rng: random.Random, code: coded.Code, num_rows: int, inputs: int, group_size: int) -> Parts:
    groups = -(-inputs // group_size) if group_size else 1
    width = inputs if code.num_bits == 8 else -(-inputs // 2)
    codes = torch.tensor([[rng.randrange(120) for _ in range(width)] for _ in range(num_rows)], dtype=torch.uint8)
    zeros = torch.full((num_rows, groups), rng.randrange(16), dtype=torch.uint8) if code.has_zeros else None
    return {"codes": codes.view(code.dtype), "scales": normal(rng, num_rows, groups), "zeros": zeros}


def weight_of(rng: random.Random, outputs: int, inputs: int) -> Parts:
    """The parts of a packed weight."""
    code, group_size = rng.choice(list(coded.CODES.values())), rng.choice((0, 32, 64))
    weight = coded.make_weight(code, outputs, inputs, group_size, lambda shape, dtype: torch.zeros(*shape, dtype=dtype))
    coded.pack_rows(PORTABLE, weight, **rows_of(rng, code, outputs, inputs, group_size), first_row=0)
    return {
        "code": code, "packed": weight.packed, "scales": weight.scales, "zeros": weight.zeros, "input_size": inputs,
        "group_size": group_size,
    }  # fmt: skip


def taken(args: Parts) -> coded.CodedWeight:
    """The weight whose parts are among the arguments, which lose them."""
    names = ("code", "packed", "scales", "zeros", "input_size", "group_size")
    return coded.CodedWeight(**{name: args.pop(name) for name in names})


def order_of(rng: random.Random, *shape: int) -> torch.Tensor | None:
    return None if rng.random() < 0.5 else torch.randint(0, shape[-1], shape, dtype=torch.int32)


def coded_product(rng: random.Random) -> Call:
    rows, inputs, is_gated = number(rng), number(rng), rng.random() < 0.5
    outputs = 16 * rng.randrange(1, 4) if is_gated else number(rng)
    num_weights = 2 * outputs if is_gated else outputs
    args = {
        "x": normal(rng, rows, inputs, dtype=BF16), **weight_of(rng, num_weights, inputs), "output_size": outputs,
        "bias": rng.choice((None, normal(rng, num_weights))), "order": order_of(rng, inputs), "is_gated": is_gated,
    }  # fmt: skip

    def linear(runtime: NativeRuntime, **args: Any) -> torch.Tensor:
        return coded.linear(runtime, weight=taken(args), **args)

    return Call(linear, args)


def coded_experts(rng: random.Random) -> Call:
    num_experts, inputs, is_gated = rng.choice((1, 4)), number(rng), rng.random() < 0.5
    outputs = 16 if is_gated else number(rng)
    num_weights = 2 * outputs if is_gated else outputs
    routing = routing_of(rng, number(rng), num_experts)
    args = {
        "x": normal(rng, len(routing.places), inputs, dtype=BF16), "rows": routing.rows, "starts": routing.starts,
        **weight_of(rng, num_experts * experts.outputs_of_expert(num_weights), inputs), "output_size": outputs,
        "bias": rng.choice((None, normal(rng, num_experts, num_weights))),
        "order": order_of(rng, num_experts, inputs), "is_gated": is_gated,
    }  # fmt: skip

    def grouped_linear(runtime: NativeRuntime, **args: Any) -> torch.Tensor:
        return coded.grouped_linear(runtime, weight=taken(args), **args)

    return Call(grouped_linear, args)


def coded_pack(rng: random.Random) -> Call:
    rows, inputs, code, group_size = number(rng), number(rng), rng.choice(list(coded.CODES.values())), 32
    weight = coded.make_weight(
        code, rows + 9, inputs, group_size, lambda shape, dtype: torch.zeros(*shape, dtype=dtype)
    )
    given = rows_of(rng, code, rows, inputs, group_size)
    args = {
        "packed": weight.packed, "packed_scales": weight.scales, "packed_zeros": weight.zeros, **given,
        "first_row": rng.randrange(9),
    }  # fmt: skip

    def pack_rows(
        runtime: NativeRuntime, packed: Any, packed_scales: Any, packed_zeros: Any, **args: Any
    ) -> bool:  # fmt: skip
        into = coded.CodedWeight(code, packed, packed_scales, packed_zeros, inputs, group_size)
        return coded.pack_rows(runtime, into, **args)

    return Call(pack_rows, args, ("packed", "packed_scales", "packed_zeros"))


def coded_gather(rng: random.Random) -> Call:
    rows, inputs = number(rng), number(rng)
    ids = torch.tensor([rng.randrange(rows) for _ in range(7)], dtype=rng.choice((torch.int32, torch.int64)))
    args = {"ids": ids, **weight_of(rng, rows, inputs), "dtype": rng.choice((BF16, torch.float32))}

    def gather_rows(runtime: NativeRuntime, **args: Any) -> torch.Tensor:
        return coded.gather_rows(runtime, weight=taken(args), **args)

    return Call(gather_rows, args)


CODED_CALLS = {
    "coded_product": coded_product, "coded_experts": coded_experts, "coded_pack": coded_pack,
    "coded_gather": coded_gather,
}  # fmt: skip
