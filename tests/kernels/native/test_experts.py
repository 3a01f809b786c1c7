"""Mixtures of experts: routing as the reference, products with the bits of each expert's own, sums in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import experts, linear, quant
from quire.kernels.native.block_quant import BLOCK_KERNELS, BlockKernel
from quire.kernels.native.elementwise import clamped_silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import activation as reference_activation
from quire.kernels.reference import experts as reference
from quire.kernels.routing import Routing
from tests.each import each
from tests.kernels.native.blocks import random_blocks
from tests.kernels.native.guards import assert_close, randn, same_bits

BF16, F32 = torch.bfloat16, torch.float32
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, normalized": {"is_normalized": True},
    "softmax of chosen": {"scoring": "softmax_of_chosen"},
    "sigmoid, scaled": {"scoring": "sigmoid", "is_normalized": True, "scale": 2.5},
    "groups by their best": {"num_groups": 6, "num_chosen_groups": 2, "scale": 16.0},
    "groups by their two best": {
        "scoring": "sigmoid", "num_groups": 6, "num_chosen_groups": 3, "group_score": "top2", "is_normalized": True,
    },
    "sparse mixer": {"jitter": 0.2},
    "experts of different weight": {"is_normalized": True, "expert_scales": torch.linspace(0.2, 3.0, 18)},
}  # fmt: skip
# Rows of each expert: none, one, register blocks, a tile and more than a task.
COUNTS = [0, 1, 0, 7, 40, 2, 16, 17, 270, 0]

Format = quant.QuantFormat | BlockKernel | None
formats = each("format", [None, quant.INT8, quant.INT4, BLOCK_KERNELS["Q4_K"], BLOCK_KERNELS["MXFP4"]])


@each("name", ROUTERS)
@each("corrected", [False, True])
def test_a_router_chooses_and_weighs_as_the_reference(runtime: NativeRuntime, name: str, corrected: bool):
    options = ROUTERS[name]
    logits = randn(37, 18) * 2
    correction = randn(18, seed=1) if corrected else None
    num_chosen = 2 if "jitter" in options else 4
    actual = experts.route(runtime, logits, num_chosen, correction, **options)
    expected = reference.route(logits, num_chosen, correction, **options)
    assert torch.equal(actual.expert_ids, expected.expert_ids)
    assert_close(actual.weights, expected.weights, atol=1e-6 * options.get("scale", 1.0))
    for part in ("starts", "rows", "places"):
        assert torch.equal(getattr(actual, part), getattr(expected, part)), part


@each("name", ROUTERS)
def test_a_choice_has_the_same_bits_on_every_tier_and_alone(runtime: NativeRuntime, portable: NativeRuntime, name: str):
    logits = randn(11, 18)
    num_chosen = 2 if "jitter" in ROUTERS[name] else 4
    together = experts.route(runtime, logits, num_chosen, **ROUTERS[name])
    for token in range(len(logits)):
        alone = experts.route(portable, logits[token : token + 1], num_chosen, **ROUTERS[name])
        assert same_bits(together.weights[token], alone.weights[0])
        assert torch.equal(together.expert_ids[token], alone.expert_ids[0])


def test_of_equal_experts_the_first_are_chosen(runtime: NativeRuntime):
    logits = torch.zeros(2, 40)
    logits[1, [7, 30, 31]] = 1.0
    logits[0, 5] = -0.0
    routing = experts.route(runtime, logits, 4, is_normalized=True)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3], [7, 30, 31, 0]]


@each("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_choose_different_experts(runtime: NativeRuntime, value: float):
    for options in ROUTERS.values():
        for logits in (torch.full((1, 18), value), randn(1, 18).index_fill(1, torch.tensor([3]), value)):
            chosen = experts.route(runtime, logits, 2, **options).expert_ids[0].tolist()
            assert len(set(chosen)) == 2 and all(0 <= expert < 18 for expert in chosen)


def routing_of(counts: list[int], num_x_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, starts) that give every expert so many rows."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return torch.randint(0, num_x_rows, (int(starts[-1]),), generator=torch.Generator().manual_seed(0)).int(), starts


class Weights:
    """Experts' weights, packed as one."""

    def __init__(
        self, runtime: NativeRuntime, num_experts: int, outputs: int, inputs: int, dtype: torch.dtype,
        format: Format,
    ) -> None:  # fmt: skip
        self.format, self.outputs = format, outputs
        padded = experts.outputs_of_expert(outputs)
        if format is None:
            self.packed = torch.zeros(linear.packed_shape(num_experts * padded, inputs, dtype), dtype=dtype)
            self.scales = None
        elif isinstance(format, BlockKernel):
            self.packed = torch.zeros(format.packed_shape(num_experts * padded, inputs), dtype=torch.uint8)
            self.scales = None
        else:
            self.packed = torch.zeros(format.packed_shape(num_experts * padded, inputs), dtype=torch.int8)
            self.scales = torch.zeros(format.scales_shape(num_experts * padded, inputs), dtype=format.scale_dtype)
        for expert in range(num_experts):
            rows = randn(outputs, inputs, dtype=dtype, seed=expert)
            if format is None:
                linear.pack_rows(runtime, rows, self.packed, expert * padded)
            elif isinstance(format, BlockKernel):
                blocks = random_blocks(format, outputs, inputs, seed=expert)
                format.pack_rows(runtime, blocks, self.packed, expert * padded)
            else:
                assert self.scales is not None
                format.pack_rows(runtime, rows, self.packed, self.scales, expert * padded)
        self.num_experts = num_experts

    def grouped(self, runtime: NativeRuntime, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor,
                bias: torch.Tensor | None = None, *, is_gated: bool = False) -> torch.Tensor:  # fmt: skip
        size = self.outputs // 2 if is_gated else self.outputs
        return experts.grouped_linear(
            runtime, x, rows, starts, self.packed, size, bias, scales=self.scales, format=self.format, is_gated=is_gated
        )

    def alone(self, runtime: NativeRuntime, expert: int, x: torch.Tensor, bias: torch.Tensor | None,
              is_gated: bool) -> torch.Tensor:  # fmt: skip
        """The product with one expert's weight."""
        packed = self.packed.chunk(self.num_experts)[expert]
        if self.format is None:
            if is_gated:
                return linear.gated_linear(runtime, x, packed, self.outputs // 2, bias)
            return linear.linear(runtime, x, packed, self.outputs, bias)
        if isinstance(self.format, BlockKernel):
            if is_gated:
                return self.format.gated_linear(runtime, x, packed, self.outputs // 2, bias)
            return self.format.linear(runtime, x, packed, self.outputs, bias)
        assert self.scales is not None
        scales = self.scales.chunk(self.num_experts)[expert]
        if is_gated:
            return self.format.gated_linear(runtime, x, packed, scales, self.outputs // 2, bias)
        return self.format.linear(runtime, x, packed, scales, self.outputs, bias)


@formats
@each("dtype", [BF16, F32])
@each("is_gated, outputs", [(True, 96), (False, 77)])
def test_rows_have_the_bits_of_their_experts_own_product(
    runtime: NativeRuntime, format: Format, dtype: torch.dtype, is_gated: bool, outputs: int
):
    inputs = 256 if isinstance(format, BlockKernel) else 70
    weights = Weights(runtime, len(COUNTS), outputs, inputs, dtype, format)
    x = randn(50, inputs + 20, dtype=dtype)[:, 3 : inputs + 3]
    bias = randn(len(COUNTS), outputs, dtype=dtype, seed=9)
    rows, starts = routing_of(COUNTS, len(x))
    for given_bias in (None, bias):
        actual = weights.grouped(runtime, x, rows, starts, given_bias, is_gated=is_gated)

        def alone(expert: int, own: torch.Tensor, bias: torch.Tensor | None = given_bias) -> torch.Tensor:
            return weights.alone(runtime, expert, own, None if bias is None else bias[expert], is_gated)

        expected = reference.grouped_linear(x.contiguous(), rows, starts, alone, actual.shape[1])
        assert same_bits(actual, expected)
    assert same_bits(weights.grouped(runtime, x[rows.long()], None, starts, bias, is_gated=is_gated), actual)


@formats
def test_one_token_and_nothing_are_computed(runtime: NativeRuntime, format: Format):
    inputs = 512 if isinstance(format, BlockKernel) else 300
    weights = Weights(runtime, 6, 96, inputs, BF16, format)
    x = randn(1, inputs, dtype=BF16)
    starts = torch.tensor([0, 1, 1, 1, 2, 2, 3]).int()
    actual = weights.grouped(runtime, x, torch.zeros(3, dtype=torch.int32), starts, is_gated=True)
    for row, expert in enumerate((0, 3, 5)):
        assert same_bits(actual[row], weights.alone(runtime, expert, x, None, True)[0])
    nothing = weights.grouped(runtime, x[:0], None, torch.zeros(7, dtype=torch.int32))
    assert nothing.shape == (0, 96)


@each("dtype", [BF16, F32])
@each("size", [5, 48, 2100])
def test_outputs_are_summed_in_the_order_of_the_choice(runtime: NativeRuntime, dtype: torch.dtype, size: int):
    routing = reference.route(randn(9, 12), 3)
    rows, shared = randn(27, size, dtype=dtype), randn(9, size, dtype=dtype, seed=1)
    gate = randn(9, 1)
    plain = experts.combine(runtime, rows, routing.places, routing.weights)
    assert same_bits(plain, reference.combine(rows, routing.places, routing.weights))
    added = experts.combine(runtime, rows, routing.places, None, shared)
    assert same_bits(added, reference.combine(rows, routing.places, None, shared))
    gated = experts.combine(runtime, rows, routing.places, routing.weights, shared, gate)
    expected = reference.combine(rows.float(), routing.places, routing.weights, shared.float(), gate)
    assert_close(gated, expected, atol=1e-5 if dtype == F32 else 0.05)


@each("dtype", [BF16, F32])
def test_weighed_inputs_lie_where_their_experts_read_them(runtime: NativeRuntime, dtype: torch.dtype):
    routing, x = reference.route(randn(9, 12), 3), randn(9, 50, dtype=dtype)[:, 7:]
    actual = experts.spread(runtime, x, routing.places, routing.weights)
    assert same_bits(actual, reference.spread(x, routing.places, routing.weights))


@each("dtype", [BF16, F32])
def test_clamped_gates_and_ups_equal_the_reference(runtime: NativeRuntime, portable: NativeRuntime, dtype: torch.dtype):
    x = randn(5, 2 * 37, dtype=dtype) * 4
    actual = clamped_silu_and_mul(runtime, x, 5.0, 1.702, 1.0)
    assert same_bits(actual, clamped_silu_and_mul(portable, x, 5.0, 1.702, 1.0))
    expected = reference_activation.clamped_silu_and_mul(x.float(), 5.0, 1.702, 1.0)
    assert_close(actual, expected, atol=1e-5, rtol=2**-7 if dtype == BF16 else 1e-6)


def changed(routing: Routing, part: str, value: int) -> torch.Tensor:
    tensor = getattr(routing, part).clone()
    tensor.view(-1)[2] = value
    return torch.as_tensor(tensor)


def test_rows_are_sorted_by_other_numbers_as_the_reference_sorts_them(runtime: NativeRuntime):
    routing = reference.route(randn(33, 12), 3)
    for seed in range(3):
        slots = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).int()
        found, expected = experts.arrange(runtime, routing, slots), reference.arrange(routing, slots)
        for part in ("expert_ids", "weights", "starts", "rows", "places"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), part
        with pytest.raises(ShapeError, match="slots names"):
            experts.arrange(runtime, routing, slots + 1)


def test_a_part_of_the_experts_computes_its_rows_alone(runtime: NativeRuntime):
    routing, x = reference.route(randn(9, 6), 2), randn(9, 40)
    weights = Weights(runtime, 6, 32, 40, F32, None)
    whole = weights.grouped(runtime, x, routing.rows, routing.starts)
    part = weights.grouped(runtime, x, routing.rows, routing.starts.clamp(max=int(routing.starts[4])))
    assert torch.equal(part[: routing.starts[4]], whole[: routing.starts[4]])


def test_wrong_indices_are_refused(runtime: NativeRuntime):
    routing = reference.route(randn(9, 6), 2)
    weights = Weights(runtime, 6, 32, 40, F32, None)
    x, rows = randn(9, 40), randn(18, 40)
    for bad in (-1, 9, 2**31 - 1):
        with pytest.raises(ShapeError, match="rows names"):
            weights.grouped(runtime, x, changed(routing, "rows", bad), routing.starts)
    for bad in (-1, 19):
        with pytest.raises(ShapeError, match="starts"):
            weights.grouped(runtime, x, routing.rows, changed(routing, "starts", bad))
    with pytest.raises(ShapeError, match="starts lie outside the rows"):
        weights.grouped(runtime, x, routing.rows[:-1].contiguous(), routing.starts)
    for bad in (-1, 18):
        with pytest.raises(ShapeError, match="places"):
            experts.combine(runtime, rows, changed(routing, "places", bad), None)
        with pytest.raises(ShapeError, match="places"):
            experts.spread(runtime, x, changed(routing, "places", bad), routing.weights)


def test_impossible_choices_are_refused(runtime: NativeRuntime):
    logits = randn(3, 12)
    for num_chosen, options in [
        (0, {}), (13, {}), (2, {"num_groups": 5}), (2, {"num_groups": 4, "num_chosen_groups": 5}),
        (4, {"num_groups": 4, "num_chosen_groups": 1}), (2, {"scoring": "argmax"}), (2, {"group_score": "mean"}),
    ]:  # fmt: skip
        with pytest.raises(ShapeError):
            experts.route(runtime, logits, num_chosen, **options)
    with pytest.raises(ShapeError):
        experts.route(runtime, logits.double(), 2)
    with pytest.raises(ShapeError):
        experts.route(runtime, logits, 2, randn(11))
    with pytest.raises(ShapeError):
        experts.route(runtime, logits, 2, expert_scales=randn(11))
