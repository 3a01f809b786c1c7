"""The gated delta rule of Gated DeltaNet layers, and the gates it takes. Called by recurrent layers; stateless."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import refuse
from quire.kernels.native.checks import DTYPE_CODES, check_number, check_rows, check_size, check_tensor
from quire.kernels.native.recurrent import native_batch, native_states
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.recurrent import RecurrentBatch

VALUE_SIZE_MULTIPLE = 16
_GATES = (torch.float32,)


def delta_gates(
    runtime: NativeRuntime, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of the state stays, and how much of a change is made, per token and head.

    Args:
        b, a: [num_tokens, num_heads] bfloat16 or float32; rows may be strided, in both alike.
        a_log, bias: [num_heads] float32.

    Returns:
        (decay, beta), each [num_tokens, num_heads] float32: exp(-exp(a_log) * softplus(a + bias)) and sigmoid(b).

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Reference: kernels/reference/delta_net.py
    """
    check_rows("b", b)
    num_tokens, num_heads = b.shape
    check_tensor("a", a, (b.dtype,), (num_tokens, num_heads), strided_rows=True)
    if num_tokens > 1 and a.stride(0) != b.stride(0):
        raise ShapeError(f"a and b have rows {a.stride(0)} and {b.stride(0)} apart, expected the same", field="a")
    check_tensor("a_log", a_log, _GATES, (num_heads,))
    check_tensor("bias", bias, _GATES, (num_heads,))
    decay, beta = (runtime.empty(num_tokens, num_heads, dtype=torch.float32) for _ in range(2))
    runtime.library.delta_gates(
        runtime.tier_idx, runtime.pool, b.data_ptr(), a.data_ptr(), b.stride(0), a_log.data_ptr(), bias.data_ptr(),
        decay.data_ptr(), beta.data_ptr(), num_tokens, num_heads, DTYPE_CODES[b.dtype],
    )  # fmt: skip
    return decay, beta


def gated_delta_rule(
    runtime: NativeRuntime,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    num_key_heads: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per token and head: decay the state, move what it gives for the key towards the value, read it by the query.

    Token after token in float32: the bits of a row, and of the state after it, depend on its request's tokens up to it
    alone: not on the batch, on how a prompt is cut into chunks, on threads, or on the tier.

    Args:
        qkv: [num_tokens, 2 * num_key_heads * key_size + num_value_heads * value_size] bfloat16 or float32: queries,
            keys, values; rows may be strided, the requests own all of them. Queries and keys are scaled to length 1;
            value head h has those of head h // (num_value_heads / num_key_heads).
        decay, beta: [num_tokens, num_value_heads] float32.
        states: [num_blocks, num_value_heads, key_size, value_size] float32; value_size is a multiple of 16; blocks may
            be strided; mutated.
        scale: factor on the queries.
        out: [num_tokens, num_value_heads * value_size], contiguous; written and returned.

    Returns:
        [num_tokens, num_value_heads * value_size], dtype of `qkv`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, requests
            share a block that is written, or what is written overlaps another tensor.

    Cost: 7 operations per token and element of the state; in a decode step each state is read and written once.
    Reference: kernels/reference/delta_net.py
    Source: Yang et al. 2025 (Gated DeltaNet), section 3.1, equation 10.
    """
    check_rows("qkv", qkv)
    num_tokens = len(qkv)
    check_size("num_key_heads", num_key_heads, 1)
    check_number("scale", scale)
    num_value_heads, key_size, value_size = _head_shape(states, num_key_heads)
    values = num_value_heads * value_size
    check_tensor("qkv", qkv, (qkv.dtype,), (num_tokens, 2 * num_key_heads * key_size + values), strided_rows=True)
    for name, gate in (("decay", decay), ("beta", beta)):
        check_tensor(name, gate, _GATES, (num_tokens, num_value_heads))
    native = native_states(runtime, "states", states, torch.float32, (num_value_heads, key_size, value_size))
    steps = native_batch(runtime, batch, num_tokens)
    if out is None:
        out = runtime.empty(num_tokens, values, dtype=qkv.dtype)
    else:
        check_tensor("out", out, (qkv.dtype,), (num_tokens, values))
    refuse(runtime.library.gated_delta_rule(
        runtime.tier_idx, runtime.pool, qkv.data_ptr(), qkv.stride(0), decay.data_ptr(), beta.data_ptr(),
        out.data_ptr(), native, steps, num_key_heads, num_value_heads, key_size, value_size, scale,
        DTYPE_CODES[qkv.dtype],
    ))  # fmt: skip
    return out


def _head_shape(states: torch.Tensor, num_key_heads: int) -> tuple[int, int, int]:
    """(num_value_heads, key_size, value_size) of states that fit so many key heads."""
    if not isinstance(states, torch.Tensor) or states.dim() != 4 or states.numel() == 0:
        raise ShapeError("states is not a tensor [blocks, value heads, key size, value size]", field="states")
    num_value_heads, key_size, value_size = states.shape[1:]
    if num_value_heads % num_key_heads:
        raise ShapeError(f"{num_value_heads} value heads are not a multiple of {num_key_heads} key heads")
    if value_size % VALUE_SIZE_MULTIPLE:
        raise ShapeError(f"states has values of {value_size}, expected a multiple of 16", field="states")
    return num_value_heads, key_size, value_size
