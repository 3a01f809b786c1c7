"""Selective state spaces of Mamba 1 and 2 over the tokens of a step. Called by recurrent layers; stateless.

Each token's state is made from that of the token before it and nothing else is summed across tokens, so the bits of a
row depend on the tokens before it alone: not on the batch, on how a prompt is cut into chunks, on threads, or on the
tier.
"""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import refuse
from quire.kernels.native.checks import DTYPE_CODES, check_number, check_rows, check_size, check_tensor
from quire.kernels.native.recurrent import native_batch, native_states
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.state_layout import mamba_state_shape

MAX_STATE_SIZE = 256


def mamba_scan(
    runtime: NativeRuntime,
    x: torch.Tensor,
    time_step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the recurrence of Mamba 1 over each request's tokens, in float32, rounded once.

    With dt = softplus(time_step): h = exp(dt * a) * h + dt * x * b, and the result is (c . h + skip * x) * silu(gate).

    Args:
        x: [num_tokens, inner_size] bfloat16 or float32; the requests own all rows. Rows of all inputs may be strided.
        time_step: [num_tokens, inner_size].
        b, c: [num_tokens, state_size], at most 256 columns.
        gate: [num_tokens, inner_size]; None = the result is not gated.
        a: float32, negative, laid out by `state_layout.in_lanes`; its padding is finite.
        skip: [inner_size] float32 (the paper's D).
        states: [num_blocks, *mamba_state_shape(inner_size, state_size)] float32; blocks may be strided; mutated.
        out: [num_tokens, inner_size], contiguous; written and returned.

    Returns:
        [num_tokens, inner_size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, requests
            share a block that is written, or what is written overlaps another tensor.

    Cost: an exponential for each of num_tokens * inner_size * state_size; compute bound.
    Reference: kernels/reference/state_space.py
    Source: Gu and Dao 2023 (Mamba), section 3.2, algorithm 2.
    """
    check_rows("x", x)
    dtype, (num_tokens, inner_size) = x.dtype, x.shape
    _check_like("b", b, x, -1)
    state_size = b.shape[1]
    check_size("state_size", state_size, 1, MAX_STATE_SIZE)
    _check_like("c", c, x, state_size)
    _check_like("time_step", time_step, x, inner_size)
    if gate is not None:
        _check_like("gate", gate, x, inner_size)
    shape = mamba_state_shape(inner_size, state_size)
    check_tensor("a", a, (torch.float32,), shape)
    check_tensor("skip", skip, (torch.float32,), (inner_size,))
    native = native_states(runtime, "states", states, torch.float32, shape)
    steps = native_batch(runtime, batch, num_tokens)
    if out is None:
        out = runtime.empty(num_tokens, inner_size, dtype=dtype)
    else:
        check_tensor("out", out, (dtype,), (num_tokens, inner_size))
    refuse(runtime.library.mamba_scan(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), time_step.data_ptr(), time_step.stride(0),
        b.data_ptr(), b.stride(0), c.data_ptr(), c.stride(0), *_pointer(gate), a.data_ptr(), skip.data_ptr(),
        out.data_ptr(), inner_size, state_size, native, steps, DTYPE_CODES[dtype],
    ))  # fmt: skip
    return out


def mamba2_scan(
    runtime: NativeRuntime,
    x: torch.Tensor,
    time_step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    skip: torch.Tensor,
    time_step_bias: torch.Tensor,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    num_groups: int,
    time_step_range: tuple[float, float],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the recurrence of Mamba 2 over each request's tokens, in float32, rounded once.

    With dt = softplus(time_step + bias) limited to `time_step_range`, for every head with the b and c of its group:
    s = exp(dt * a) * s + b (x) (dt * x), and the result is (c . s + skip * x) * silu(gate).

    Args:
        x: [num_tokens, num_heads * head_size] bfloat16 or float32; the requests own all rows. Rows of all inputs may be
            strided.
        time_step: [num_tokens, num_heads].
        b, c: [num_tokens, num_groups * state_size]; state_size is at most 256.
        gate: as `x`; None = the result is not gated.
        a: [num_heads] float32, negative.
        skip, time_step_bias: [num_heads] float32.
        states: [num_blocks, num_heads, state_size, head_size] float32; blocks may be strided; mutated.
        num_groups: divides the number of heads; a group's heads follow each other.
        time_step_range: least and largest dt.
        out: [num_tokens, num_heads * head_size], contiguous; written and returned.

    Returns:
        [num_tokens, num_heads * head_size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, requests
            share a block that is written, or what is written overlaps another tensor.

    Cost: five operations for each of num_tokens * num_heads * head_size * state_size; compute bound.
    Reference: kernels/reference/state_space.py
    Source: Dao and Gu 2024 (Mamba-2), section 3, equation 16 with a scalar A.
    """
    check_rows("x", x)
    dtype, (num_tokens, inner_size) = x.dtype, x.shape
    check_tensor("a", a, (torch.float32,), (-1,))
    num_heads = len(a)
    check_size("num_heads", num_heads, 1)
    check_size("num_groups", num_groups, 1)
    _check_like("b", b, x, -1)
    if inner_size % num_heads or num_heads % num_groups or b.shape[1] % num_groups:
        raise ShapeError(
            f"x has {inner_size} columns and b {b.shape[1]}, which {num_heads} heads in {num_groups} groups do not "
            "divide",
            field="x",
        )
    head_size, state_size = inner_size // num_heads, b.shape[1] // num_groups
    check_size("state_size", state_size, 1, MAX_STATE_SIZE)
    _check_like("c", c, x, b.shape[1])
    _check_like("time_step", time_step, x, num_heads)
    if gate is not None:
        _check_like("gate", gate, x, inner_size)
    for name, numbers in (("skip", skip), ("time_step_bias", time_step_bias)):
        check_tensor(name, numbers, (torch.float32,), (num_heads,))
    least, largest = time_step_range
    check_number("time_step_range", least)
    check_number("time_step_range", largest)
    native = native_states(runtime, "states", states, torch.float32, (num_heads, state_size, head_size))
    steps = native_batch(runtime, batch, num_tokens)
    if out is None:
        out = runtime.empty(num_tokens, inner_size, dtype=dtype)
    else:
        check_tensor("out", out, (dtype,), (num_tokens, inner_size))
    refuse(runtime.library.mamba2_scan(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), time_step.data_ptr(), time_step.stride(0),
        b.data_ptr(), b.stride(0), c.data_ptr(), c.stride(0), *_pointer(gate), a.data_ptr(), skip.data_ptr(),
        time_step_bias.data_ptr(), least, largest, out.data_ptr(), num_heads, head_size, num_groups, state_size,
        native, steps, DTYPE_CODES[dtype],
    ))  # fmt: skip
    return out


def _check_like(name: str, rows: torch.Tensor, x: torch.Tensor, num_columns: int) -> None:
    """Refuse anything but a row for each of x, in its dtype."""
    check_tensor(name, rows, (x.dtype,), (x.shape[0], num_columns), strided_rows=True)


def _pointer(rows: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))
