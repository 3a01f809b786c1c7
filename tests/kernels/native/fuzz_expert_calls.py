"""Right calls of the wrappers for mixtures of experts, as `fuzz_calls`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.kernels.native import experts
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.routing import Routing
from tests.kernels.native.fuzz import Call
from tests.kernels.native.fuzz_calls import FLOATS, PORTABLE, filled, normal, number, packed_weight


def route(rng: random.Random) -> Call:
    groups = rng.choice((1, 1, 2, 3))
    num_experts = groups * rng.choice((2, 5, 16))
    args = {
        "logits": normal(rng, number(rng), num_experts),
        "num_chosen": rng.choice((1, 2)),
        "correction": rng.choice((None, normal(rng, num_experts))),
        "scoring": rng.choice(("softmax", "sigmoid", "softmax_of_chosen")),
        "is_normalized": rng.random() < 0.5,
        "scale": 1.5,
        "num_groups": groups,
        "num_chosen_groups": rng.randrange(groups) + 1,
        "group_score": rng.choice(("max", "top2")),
        "jitter": rng.choice((0.0, 0.1)),
        "expert_scales": rng.choice((None, normal(rng, num_experts))),
    }

    def function(runtime: NativeRuntime, **args: Any) -> Any:
        routing = experts.route(runtime, **args)
        return routing.expert_ids, routing.weights, routing.starts, routing.rows, routing.places

    function.__name__ = "route"
    return Call(function, args)


def routing_of(rng: random.Random, tokens: int, num_experts: int) -> Routing:
    logits = normal(rng, tokens, num_experts)
    return experts.route(PORTABLE, logits, rng.randrange(1, min(num_experts, 3) + 1))


def arrange(rng: random.Random) -> Call:
    num_experts = rng.choice((1, 4, 9))
    routing = routing_of(rng, number(rng), num_experts)
    slots = torch.tensor(rng.sample(range(num_experts), num_experts), dtype=torch.int32)

    def function(runtime: NativeRuntime, expert_ids: torch.Tensor, slots: torch.Tensor) -> Any:
        arranged = experts.arrange(runtime, replace(routing, expert_ids=expert_ids), slots)
        return arranged.starts, arranged.rows, arranged.places

    function.__name__ = "arrange"
    return Call(function, {"expert_ids": routing.expert_ids, "slots": slots})


def grouped_product(rng: random.Random) -> Call:
    num_experts, inputs, dtype, is_gated = rng.choice((1, 4)), number(rng), rng.choice(FLOATS), rng.random() < 0.5
    outputs = 16 if is_gated else number(rng)
    num_weights = 2 * outputs if is_gated else outputs
    routing = routing_of(rng, number(rng), num_experts)
    weights: dict[str, Any]
    if rng.random() < 0.4:
        packed = packed_weight(rng, num_experts * experts.outputs_of_expert(num_weights), inputs, dtype)
        weights = {"packed": packed, "scales": None, "format": None}
    else:
        format, weights = filled(rng, num_experts * experts.outputs_of_expert(num_weights), inputs)
        weights["format"] = format
    args = {
        "x": normal(rng, len(routing.places), inputs, dtype=dtype),
        "rows": routing.rows,
        "starts": routing.starts,
        **weights,
        "output_size": outputs,
        "bias": rng.choice((None, normal(rng, num_experts, num_weights))),
        "is_gated": is_gated,
    }
    return Call(experts.grouped_linear, args)


def combine(rng: random.Random) -> Call:
    tokens, size, dtype = number(rng), number(rng), rng.choice(FLOATS)
    routing = routing_of(rng, tokens, 5)
    args = {
        "rows": normal(rng, len(routing.rows), size, dtype=dtype),
        "places": routing.places,
        "weights": rng.choice((None, routing.weights)),
        "shared": rng.choice((None, normal(rng, tokens, size, dtype=dtype))),
        "shared_gate": rng.choice((None, normal(rng, tokens, 1))),
    }
    return Call(experts.combine, args)


def spread(rng: random.Random) -> Call:
    tokens = number(rng)
    routing = routing_of(rng, tokens, 5)
    x = normal(rng, tokens, number(rng), dtype=rng.choice(FLOATS))
    return Call(experts.spread, {"x": x, "places": routing.places, "weights": routing.weights})


EXPERT_CALLS: dict[str, Callable[[random.Random], Call]] = {
    maker.__name__: maker for maker in (route, arrange, grouped_product, combine, spread)
}
