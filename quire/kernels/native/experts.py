"""Mixtures of experts: the choice of experts, their products in one call, and the sum of their outputs.

Called by layers; stateless. All results have sizes that depend on the number of tokens alone, so that steps can be
recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ShapeError
from quire.kernels.native import linear, quant
from quire.kernels.native.block_quant import BlockKernel
from quire.kernels.native.checks import (
    DTYPE_CODES,
    FLOATS,
    check_is_tensor,
    check_number,
    check_rows,
    check_size,
    check_tensor,
)
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.routing import Routing

# As in csrc/include/quire/moe.h.
MAX_EXPERTS = 4096
MAX_CHOSEN = 64
_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
_SPARSE_MIXER = 3
_GROUP_SCORES = {"max": False, "top2": True}
_MAX_ROWS = 2**31 - 1


def route(
    runtime: NativeRuntime,
    logits: torch.Tensor,
    num_chosen: int,
    correction: torch.Tensor | None = None,
    *,
    scoring: str = "softmax",
    is_normalized: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    group_score: str = "max",
    jitter: float = 0.0,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of every token.

    Args:
        logits: [num_tokens, num_experts] float32, contiguous.
        num_chosen: experts of a token.
        correction: [num_experts] float32, added to the scores for the choice alone.
        scoring: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen".
        is_normalized: weights are divided by their sum.
        scale: factor on the weights.
        num_groups, num_chosen_groups: experts outside the best groups are not chosen.
        group_score: "max", or "top2": the sum of a group's two best experts.
        jitter: greater than 0: the sparse mixer, with this jitter, in place of `scoring`.
        expert_scales: [num_experts] float32: factor on the weights of each expert, at last.

    Returns:
        The routing. Of equal scores the lower expert comes first. A token's choice depends on no other token.

    Raises:
        ShapeError: a size, dtype, device, stride or choice differs from the above.

    Cost: num_experts * num_chosen steps for each token; then a pass over all choices by one thread.
    Reference: kernels/reference/experts.py
    """
    check_tensor("logits", logits, (torch.float32,), (-1, -1))
    num_tokens, num_experts = logits.shape
    _check_choice(num_experts, num_chosen, num_groups, num_chosen_groups)
    check_size("num_tokens * num_chosen", num_tokens * num_chosen, 0, _MAX_ROWS)
    if correction is not None:
        check_tensor("correction", correction, (torch.float32,), (num_experts,))
    if expert_scales is not None:
        check_tensor("expert_scales", expert_scales, (torch.float32,), (num_experts,))
    _check_name("scoring", scoring, _SCORINGS)
    _check_name("group_score", group_score, _GROUP_SCORES)
    _check_flag("is_normalized", is_normalized)
    check_number("scale", scale)
    check_number("jitter", jitter)
    num_rows = num_tokens * num_chosen
    routing = Routing(
        expert_ids=runtime.empty(num_tokens, num_chosen, dtype=torch.int32),
        weights=runtime.empty(num_tokens, num_chosen, dtype=torch.float32),
        starts=runtime.empty(num_experts + 1, dtype=torch.int32),
        rows=runtime.empty(num_rows, dtype=torch.int32),
        places=runtime.empty(num_tokens, num_chosen, dtype=torch.int32),
    )
    runtime.library.route(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), 0 if correction is None else correction.data_ptr(),
        routing.expert_ids.data_ptr(), routing.weights.data_ptr(), routing.starts.data_ptr(), routing.rows.data_ptr(),
        routing.places.data_ptr(), num_tokens, num_experts, num_chosen, num_groups, num_chosen_groups,
        _SPARSE_MIXER if jitter > 0 else _SCORINGS[scoring], _GROUP_SCORES[group_score], is_normalized, scale,
        jitter, 0 if expert_scales is None else expert_scales.data_ptr(),
    )  # fmt: skip
    return routing


def arrange(runtime: NativeRuntime, routing: Routing, slots: torch.Tensor) -> Routing:
    """The routing with the rows sorted by other numbers of the experts; each token's choices and weights stay.

    Args:
        slots: [num_experts] int32: the other number of each expert, every one of 0 .. num_experts - 1 once.

    Returns:
        The routing: `starts` are those of slots.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or an index is out of range.

    Cost: a pass over all choices by one thread.
    Reference: kernels/reference/experts.py
    """
    num_experts = len(routing.starts) - 1
    check_tensor("slots", slots, (torch.int32,), (num_experts,))
    check_tensor("expert_ids", routing.expert_ids, (torch.int32,), (-1, -1))
    num_tokens, num_chosen = routing.expert_ids.shape
    arranged = Routing(
        expert_ids=routing.expert_ids,
        weights=routing.weights,
        starts=runtime.empty(num_experts + 1, dtype=torch.int32),
        rows=runtime.empty(num_tokens * num_chosen, dtype=torch.int32),
        places=runtime.empty(num_tokens, num_chosen, dtype=torch.int32),
    )
    fault = runtime.library.arrange_rows(
        runtime.pool, routing.expert_ids.data_ptr(), slots.data_ptr(), arranged.starts.data_ptr(),
        arranged.rows.data_ptr(), arranged.places.data_ptr(), num_tokens, num_experts, num_chosen,
    )  # fmt: skip
    _refuse(fault)
    return arranged


def outputs_of_expert(output_size: int) -> int:
    """Outputs that each expert takes up in a packed weight of all: whole panels."""
    return -(-output_size // linear.PANEL_SIZE) * linear.PANEL_SIZE


def grouped_linear(
    runtime: NativeRuntime,
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    packed: torch.Tensor,
    output_size: int,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    format: quant.QuantFormat | BlockKernel | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Every expert's product with its own rows, in one call: row i is x[rows[i]] W_e^T + bias_e, starts[e] <= i.

    Args:
        x: [any, input_size] bfloat16 or float32; rows may be strided.
        rows: [num_rows] int32, each a row of `x`; None = row i is x[i].
        starts: [num_experts + 1] int32, rising, within 0 to num_rows; other rows are not computed and mean nothing.
        packed: one weight for all experts, each of which has `outputs_of_expert` outputs; dtype of `x` or of `format`.
        bias: [num_experts, output_size], dtype of `x` or float32.
        scales: of int8 and int4 weights.
        format: of quantized weights; None = they have the dtype of `x`.
        is_gated: each expert has 2 * output_size outputs (and biases), gates then ups, and silu(gate) * up results;
            output_size is a multiple of 16.

    Returns:
        [num_rows, output_size], dtype of `x`. A row has the bits of `linear` (`gated_linear`) with its expert's weight.

    Raises:
        ShapeError: a size, dtype, device, stride or index differs from the above.

    Cost: 2 * num_rows * input_size * output_size flops; reads the weights of the experts that have rows once for up to
        256 rows each. Bandwidth bound for few rows.
    Reference: kernels/reference/experts.py
    """
    check_rows("x", x)
    num_x_rows, input_size = x.shape
    check_tensor("starts", starts, (torch.int32,), (-1,))
    num_experts = len(starts) - 1
    check_size("num_experts", num_experts, 0, MAX_EXPERTS)
    check_size("output_size", output_size)
    check_size("input_size", input_size, 1)
    num_rows = num_x_rows
    if rows is not None:
        check_tensor("rows", rows, (torch.int32,), (-1,))
        num_rows = len(rows)
    _check_flag("is_gated", is_gated)
    if is_gated and output_size % linear.PANEL_SIZE:
        raise ShapeError(
            f"output_size is {output_size}, expected a multiple of {linear.PANEL_SIZE}",
            hint="use the product, then the activation",
            field="output_size",
        )
    num_weights = 2 * output_size if is_gated else output_size
    _check_weight(x.dtype, packed, scales, format, num_experts * outputs_of_expert(num_weights), input_size)
    bias_dtype = x.dtype
    if bias is not None:
        check_tensor("bias", bias, (x.dtype, torch.float32), (num_experts, num_weights))
        bias_dtype = bias.dtype
    out = runtime.empty(num_rows, output_size, dtype=x.dtype)
    kernel, of_kernel, of_weight, of_groups = _kernel_of(runtime, format, scales, input_size)
    fault = kernel(
        runtime.tier_idx, runtime.pool, *of_kernel, x.data_ptr(), x.stride(0), 0 if rows is None else rows.data_ptr(),
        num_x_rows, starts.data_ptr(), num_experts, packed.data_ptr(), *of_weight,
        0 if bias is None else bias.data_ptr(), out.data_ptr(), num_rows, output_size, input_size, *of_groups,
        DTYPE_CODES[x.dtype], DTYPE_CODES[bias_dtype], DTYPE_CODES[x.dtype], is_gated,
    )  # fmt: skip
    _refuse(fault)
    return out


def combine(
    runtime: NativeRuntime,
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's rows times their weights, in the order of its choices, and of the shared expert's output.

    Args:
        rows: [num_tokens * num_chosen, size] bfloat16 or float32.
        places: [num_tokens, num_chosen] int32: the row of each choice.
        weights: [num_tokens, num_chosen] float32; None = ones.
        shared: [num_tokens, size], dtype of `rows`: added last.
        shared_gate: [num_tokens, 1] float32: `shared` is multiplied by its sigmoid.

    Returns:
        [num_tokens, size], dtype of `rows`: summed in float32, rounded once.

    Raises:
        ShapeError: a size, dtype, device, stride or index differs from the above.

    Cost: reads the rows once; bandwidth bound.
    Reference: kernels/reference/experts.py
    """
    num_tokens, num_chosen = _check_places(places)
    check_tensor("rows", rows, FLOATS, (num_tokens * num_chosen, -1))
    size = rows.shape[1]
    if weights is not None:
        check_tensor("weights", weights, (torch.float32,), (num_tokens, num_chosen))
    if shared is not None:
        check_tensor("shared", shared, (rows.dtype,), (num_tokens, size))
    if shared_gate is not None:
        check_tensor("shared_gate", shared_gate, (torch.float32,), (num_tokens, 1))
    out = runtime.empty(num_tokens, size, dtype=rows.dtype)
    fault = runtime.library.combine_experts(
        runtime.tier_idx, runtime.pool, rows.data_ptr(), places.data_ptr(),
        0 if weights is None else weights.data_ptr(), 0 if shared is None else shared.data_ptr(),
        0 if shared_gate is None else shared_gate.data_ptr(), out.data_ptr(), num_tokens, num_chosen, size,
        DTYPE_CODES[rows.dtype],
    )  # fmt: skip
    _refuse(fault)
    return out


def spread(runtime: NativeRuntime, x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The rows of all experts, each its token's vector times the weight: where weights belong to inputs.

    Args:
        x: [num_tokens, size] bfloat16 or float32; rows may be strided.
        places: [num_tokens, num_chosen] int32: the row of each choice, every row once.
        weights: [num_tokens, num_chosen] float32.

    Returns:
        [num_tokens * num_chosen, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device, stride or index differs from the above.

    Reference: kernels/reference/experts.py
    """
    num_tokens, num_chosen = _check_places(places)
    check_rows("x", x)
    check_tensor("x", x, FLOATS, (num_tokens, -1), strided_rows=True)
    check_tensor("weights", weights, (torch.float32,), (num_tokens, num_chosen))
    out = runtime.empty(num_tokens * num_chosen, x.shape[1], dtype=x.dtype)
    fault = runtime.library.spread_rows(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), places.data_ptr(), weights.data_ptr(),
        out.data_ptr(), num_tokens, num_chosen, x.shape[1], DTYPE_CODES[x.dtype],
    )  # fmt: skip
    _refuse(fault)
    return out


def _check_choice(num_experts: int, num_chosen: int, num_groups: int, num_chosen_groups: int) -> None:
    check_size("num_experts", num_experts, 1, MAX_EXPERTS)
    check_size("num_groups", num_groups, 1, num_experts)
    check_size("num_chosen_groups", num_chosen_groups, 1, num_groups)
    if num_experts % num_groups:
        raise ShapeError(f"num_groups is {num_groups}, expected a divisor of {num_experts}", field="num_groups")
    num_eligible = num_experts // num_groups * num_chosen_groups
    check_size("num_chosen", num_chosen, 1, min(num_eligible, MAX_CHOSEN))


def _check_flag(field: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ShapeError(f"{field} is {value!r}, expected True or False", field=field)


def _check_name(field: str, value: str, known: dict[str, int] | dict[str, bool]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ShapeError(f"{field} is {value!r}, expected one of {', '.join(known)}", field=field)


def _check_places(places: torch.Tensor) -> tuple[int, int]:
    check_tensor("places", places, (torch.int32,), (-1, -1))
    num_tokens, num_chosen = places.shape
    check_size("num_chosen", num_chosen, 1, MAX_CHOSEN)
    return num_tokens, num_chosen


def _kernel_of(
    runtime: NativeRuntime,
    format: quant.QuantFormat | BlockKernel | None,
    scales: torch.Tensor | None,
    input_size: int,
) -> tuple[Any, list[int], list[int], list[int]]:
    """The library's function, and its arguments of the format: first, behind the weight, and the group size."""
    if format is None:
        return runtime.library.grouped_linear, [], [], []
    if isinstance(format, BlockKernel):
        return runtime.library.block_grouped, [format.number], [], []
    assert scales is not None
    kernel = getattr(runtime.library, f"grouped_{format.name}")
    return kernel, [], [scales.data_ptr()], [format.group_size(input_size)]


def _check_weight(
    x_dtype: torch.dtype,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    format: quant.QuantFormat | BlockKernel | None,
    num_outputs: int,
    input_size: int,
) -> None:
    if format is None:
        if scales is not None:
            raise ShapeError("scales are given without their format", field="scales")
        check_tensor("packed", packed, (x_dtype,), linear.packed_shape(num_outputs, input_size, x_dtype))
        return
    if isinstance(format, BlockKernel):
        if scales is not None:
            raise ShapeError(f"scales are given for {format.name}, whose packed weight holds them", field="scales")
        check_tensor("packed", packed, (torch.uint8,), format.packed_shape(num_outputs, input_size))
        return
    if not isinstance(format, quant.QuantFormat):
        raise ShapeError(f"format is {format!r}, expected INT8, INT4 or a block format", field="format")
    check_size("input_size", input_size, 1, quant.MAX_INPUT_SIZE)
    check_is_tensor("scales", scales)
    assert scales is not None
    check_tensor("packed", packed, (quant.PACKED_DTYPE,), format.packed_shape(num_outputs, input_size))
    check_tensor("scales", scales, (format.scale_dtype,), format.scales_shape(num_outputs, input_size))


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise ShapeError(fault, hint="starts, rows and places must be of one routing", field="routing")
