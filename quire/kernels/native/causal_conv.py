"""Causal convolution over the newest tokens of each request. Called by recurrent layers; stateless."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import refuse
from quire.kernels.native.checks import DTYPE_CODES, check_rows, check_size, check_tensor
from quire.kernels.native.recurrent import native_batch, native_states
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch

MAX_CONV_SIZE = 8


def causal_conv(
    runtime: NativeRuntime,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    has_silu: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve every channel over the newest `conv_size` inputs, in float32, rounded once.

    The bits of a row depend on it and the `conv_size - 1` inputs before it alone: not on the batch, on how a prompt is
    cut into chunks, on threads, or on the tier.

    Args:
        x: [num_tokens, channels] bfloat16 or float32; rows may be strided. The requests own all of them.
        weight: [conv_size, channels], at most 8 rows; the last row is that of the newest input.
        bias: [channels].
        states: [num_blocks, conv_size - 1, channels], the newest input last; blocks may be strided; mutated.
        has_silu: apply SiLU to the result.
        out: [num_tokens, channels], contiguous; written and returned.

    Returns:
        [num_tokens, channels], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, requests
            share a block that is written, or what is written overlaps another tensor.

    Cost: one pass over x, bandwidth bound outside the caches; SiLU takes as long as the rest.
    Reference: kernels/reference/causal_conv.py
    """
    check_rows("x", x)
    num_tokens, channels = x.shape
    check_tensor("weight", weight, (x.dtype,), (-1, channels))
    conv_size = len(weight)
    if not 2 <= conv_size <= MAX_CONV_SIZE:
        raise ShapeError(f"weight has {conv_size} rows, expected 2 to {MAX_CONV_SIZE}", field="weight")
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (channels,))
    check_size("has_silu", has_silu, 0, 1)
    native = native_states(runtime, "states", states, x.dtype, (conv_size - 1, channels))
    steps = native_batch(runtime, batch, num_tokens)
    if out is None:
        out = runtime.empty(num_tokens, channels, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_tokens, channels))
    refuse(runtime.library.causal_conv(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), native, steps, channels, conv_size, bool(has_silu),
        DTYPE_CODES[x.dtype],
    ))  # fmt: skip
    return out
