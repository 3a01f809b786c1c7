"""Reference: the selective state spaces of Mamba 1 and 2, token after token."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, silu, softplus

from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference.recurrent import each_request
from quire.kernels.state_layout import LANES


def mamba_scan(
    x: torch.Tensor,
    time_step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: RecurrentBatch,
) -> torch.Tensor:
    """Discretise and run the recurrence of each channel, in float32, rounded once.

    Args:
        x, time_step, gate: [num_tokens, inner_size].
        b, c: [num_tokens, state_size].
        a: float32, negative, laid out by `state_layout.in_lanes`.
        skip: [inner_size] float32.
        states: [num_blocks, *mamba_state_shape(inner_size, state_size)] float32; mutated.

    Returns:
        [num_tokens, inner_size], dtype of `x`.

    Source: Gu and Dao 2023 (Mamba), section 3.2, algorithm 2.
    """
    inner_size, wide_x = x.shape[1], x.float()
    dt, inputs = softplus(time_step.float()), softplus(time_step.float()) * wide_x
    padding = (0, len(a) * LANES - inner_size)
    # [num_tokens, blocks of channels, 1, LANES] and [num_tokens, state_size, 1]
    dt, inputs = (pad(rows, padding).view(-1, len(a), 1, LANES) for rows in (dt, inputs))
    columns_b, columns_c = b.float().unsqueeze(2), c.float().unsqueeze(2)
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    for request in each_request(batch, states):
        state = request.before
        for t in range(request.rows.start, request.rows.stop):
            state = torch.exp(dt[t] * a) * state + inputs[t] * columns_b[t]
            out[t] = (state * columns_c[t]).sum(dim=1).flatten()[:inner_size]
            request.leave(t, state)
    return _finished(out + wide_x * skip, gate, x.dtype)


def mamba2_scan(
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
) -> torch.Tensor:
    """Discretise and run the recurrence of each head, in float32, rounded once.

    Args:
        x, gate: [num_tokens, num_heads * head_size].
        time_step: [num_tokens, num_heads].
        b, c: [num_tokens, num_groups * state_size].
        a, skip, time_step_bias: [num_heads] float32.
        states: [num_blocks, num_heads, state_size, head_size] float32; mutated.

    Returns:
        [num_tokens, num_heads * head_size], dtype of `x`.

    Source: Dao and Gu 2024 (Mamba-2), section 3, equation 16 with a scalar A.
    """
    num_tokens, num_heads = time_step.shape
    per_head = x.float().reshape(num_tokens, num_heads, -1)
    dt = softplus(time_step.float() + time_step_bias).clamp(*time_step_range)
    grouped = (rows.float().reshape(num_tokens, num_groups, -1) for rows in (b, c))
    wide_b, wide_c = (rows.repeat_interleave(num_heads // num_groups, dim=1) for rows in grouped)
    out = torch.empty_like(per_head)
    for request in each_request(batch, states):
        state = request.before
        for t in range(request.rows.start, request.rows.stop):
            decay = torch.exp(dt[t] * a).view(num_heads, 1, 1)
            inputs = (dt[t].unsqueeze(1) * per_head[t]).unsqueeze(1)  # [num_heads, 1, head_size]
            state = decay * state + wide_b[t].unsqueeze(2) * inputs
            out[t] = (state * wide_c[t].unsqueeze(2)).sum(dim=1)
            request.leave(t, state)
    skipped = out + per_head * skip.unsqueeze(1)
    return _finished(skipped.view(num_tokens, -1), gate, x.dtype)


def _finished(result: torch.Tensor, gate: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (result if gate is None else result * silu(gate.float())).to(dtype)
