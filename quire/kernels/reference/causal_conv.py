"""Reference: causal convolution over the newest tokens of each request."""

from __future__ import annotations

import torch

from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference.recurrent import each_request


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """Convolve every channel over the newest `conv_size` inputs, in float32, rounded once.

    Args:
        x: [num_tokens, channels].
        weight: [conv_size, channels]; the last row is that of the newest input.
        bias: [channels].
        states: [num_blocks, conv_size - 1, channels]: the inputs before the step, the newest last; mutated.
        has_silu: apply SiLU to the result.

    Returns:
        [num_tokens, channels], dtype of `x`.

    Source: Gu and Dao 2023 (Mamba), section 3.4.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for request in each_request(batch, states):
        rows = request.rows
        inputs = torch.cat((request.before, x[rows]))
        windows = inputs.float().unfold(0, len(weight), 1)  # [num_rows, channels, conv_size]
        total = (windows * weight.float().T).sum(dim=-1)
        if bias is not None:
            total = total + bias.float()
        out[rows] = (torch.nn.functional.silu(total) if has_silu else total).to(x.dtype)
        for i in range(rows.stop - rows.start):
            request.leave(rows.start + i, inputs[i + 1 : i + len(weight)])
    return out
