"""Kernels of one pass over rows of activations. Called by layers; stateless."""

from __future__ import annotations

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import (
    DTYPE_CODES,
    check_apart,
    check_is_tensor,
    check_number,
    check_rows,
    check_size,
    check_tensor,
)
from quire.kernels.native.runtime import NativeRuntime

# Numbers of `Activation` in csrc/include/quire/elementwise.h.
_SILU = 0
_GELU = {"none": 1, "tanh": 2}
_CLAMPED_SILU = 3
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 4, "relu2": 5, "none": 6}
# Numbers of `GateActivation`.
_GATES = {"none": 0, "silu": 1, "sigmoid": 2}
# The bits that are all ones in infinities and NaN alone.
_EXPONENT_MASKS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


def rms_norm(
    runtime: NativeRuntime,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each row of `x`, or of x + residual, which then replaces `residual` in place.

    Args:
        x: [num_rows, size] bfloat16 or float32; rows may be strided.
        weight: [size].
        residual: [num_rows, size]; mutated.
        out: [num_rows, size]; where to put the result; may be `x` when that is contiguous.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or what is written overlaps another tensor.

    Cost: reads x (and reads and writes residual), writes the result; bandwidth bound.
    Reference: kernels/reference/norm.py
    """
    check_rows("x", x)
    num_rows, size = x.shape
    check_tensor("weight", weight, (x.dtype,), (size,))
    residual_ptr = 0
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), (num_rows, size))
        residual_ptr = residual.data_ptr()
        # `check_apart` costs as much as the kernel: nearly always both lie further apart than their sizes.
        reach = x.data_ptr() - residual_ptr, weight.data_ptr() - residual_ptr
        size_bytes = (num_rows * max(size, x.stride(0)) + size) * x.itemsize
        if min(map(abs, reach)) < size_bytes:
            check_apart("residual", residual, x=x, weight=weight)
    check_number("eps", eps)
    if out is None:
        out = runtime.empty(num_rows, size, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, size))
        is_in_place = out.data_ptr() == x.data_ptr() and x.is_contiguous()
        check_apart("out", out, x=None if is_in_place else x, weight=weight, residual=residual)
    runtime.library.rms_norm(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), residual_ptr, weight.data_ptr(), out.data_ptr(),
        num_rows, size, eps, DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def layer_norm(
    runtime: NativeRuntime,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Subtract the mean of each row of `x`, or of x + residual, and normalise it; otherwise as `rms_norm`.

    Computed in float32, rounded once.

    Args:
        x: [num_rows, size] bfloat16 or float32; rows may be strided.
        weight, bias: [size]; without a bias None.
        residual: [num_rows, size]; becomes the sum.
        out: [num_rows, size]; where to put the result; may be `x` when that is contiguous.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or what is written overlaps another tensor.

    Reference: kernels/reference/norm.py
    """
    check_rows("x", x)
    num_rows, size = x.shape
    check_tensor("weight", weight, (x.dtype,), (size,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (size,))
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), (num_rows, size))
        check_apart("residual", residual, x=x, weight=weight, bias=bias)
    check_number("eps", eps)
    if out is None:
        out = runtime.empty(num_rows, size, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, size))
        check_apart("out", out, x=None if _is_same(out, x) else x, weight=weight, bias=bias, residual=residual)
    runtime.library.layer_norm(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), 0 if residual is None else residual.data_ptr(),
        weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), num_rows, size, eps,
        DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def silu_and_mul(runtime: NativeRuntime, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The first half of each row through SiLU, times the second half.

    SiLU is computed in float32 and rounded to the dtype of `x` before the product.

    Args:
        x: [num_rows, 2 * size] bfloat16 or float32; rows may be strided.
        out: [num_rows, size]; where to put the result.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: reads x, writes the result; bandwidth bound outside the caches.
    Reference: kernels/reference/activation.py
    """
    return _gated(runtime, x, _SILU, out)


def gelu_and_mul(
    runtime: NativeRuntime, x: torch.Tensor, approximate: str = "none", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The first half of each row through GELU, times the second half; otherwise as `silu_and_mul`.

    Args:
        x: [num_rows, 2 * size] bfloat16 or float32; rows may be strided.
        approximate: "none", or "tanh" for the approximation by a hyperbolic tangent.
        out: [num_rows, size]; where to put the result.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.
        ValueError: another `approximate`.

    Reference: kernels/reference/activation.py
    """
    if approximate not in _GELU:
        raise ValueError(f"approximate={approximate!r}, expected 'none' or 'tanh'")
    return _gated(runtime, x, _GELU[approximate], out)


def activate_and_mul(
    runtime: NativeRuntime, x: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The first half of each row through an activation, times the second half; otherwise as `silu_and_mul`.

    Args:
        x: [num_rows, 2 * size] bfloat16 or float32; rows may be strided.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" (its square) or "none".
        out: [num_rows, size]; where to put the result.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.
        ValueError: another `activation`.

    Reference: kernels/reference/activation.py
    """
    return _gated(runtime, x, _activation(activation), out)


def transform(
    runtime: NativeRuntime,
    x: torch.Tensor,
    activation: str = "none",
    factor: float = 1.0,
    addend: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Factor * activation(x) + addend, in float32, rounded once.

    Args:
        x, addend: [num_rows, size] bfloat16 or float32; rows may be strided.
        activation: as `activate_and_mul`.
        out: [num_rows, size]; where to put the result; may be `x` or `addend` when that is contiguous.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or what is written overlaps another tensor.
        ValueError: another `activation`.

    Cost: reads both, writes the result; bandwidth bound outside the caches.
    Reference: kernels/reference/transform.py
    """
    check_rows("x", x)
    num_rows, size = x.shape
    if addend is not None:
        check_tensor("addend", addend, (x.dtype,), (num_rows, size), strided_rows=True)
    check_number("factor", factor)
    number = _activation(activation)
    if out is None:
        out = runtime.empty(num_rows, size, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, size))
        others = {"x": x, "addend": addend}
        check_apart("out", out, **{name: other for name, other in others.items() if not _is_same(out, other)})
    addend_ptr, addend_stride = (0, 0) if addend is None else (addend.data_ptr(), addend.stride(0))
    runtime.library.transform(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), addend_ptr, addend_stride, out.data_ptr(), num_rows,
        size, factor, number, DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def multiply(
    runtime: NativeRuntime,
    x: torch.Tensor,
    gate: torch.Tensor,
    activation: str = "none",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x` by activation(gate), in float32, rounded once.

    Args:
        x: [num_rows, size] bfloat16 or float32; rows may be strided.
        gate: likewise, or [size], which all rows share.
        activation: "none", "silu" or "sigmoid".
        out: [num_rows, size]; where to put the result.

    Returns:
        [num_rows, size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or what is written overlaps another tensor.
        ValueError: another `activation`.

    Cost: reads both, writes the result; bandwidth bound outside the caches.
    Reference: kernels/reference/activation.py
    """
    if activation not in _GATES:
        raise ValueError(f"activation={activation!r}, expected one of {', '.join(_GATES)}")
    check_rows("x", x)
    num_rows, size = x.shape
    gate_stride = _gate_stride(gate, x)
    if out is None:
        out = runtime.empty(num_rows, size, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, size))
        check_apart("out", out, x=x, gate=gate)
    runtime.library.multiply(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), gate.data_ptr(), gate_stride, out.data_ptr(),
        num_rows, size, _GATES[activation], DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def gated_rms_norm(
    runtime: NativeRuntime,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    num_groups: int = 1,
    gate_first: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the groups of each row and multiply by silu(gate) after that, or before; float32, rounded once.

    Args:
        x, gate: [num_rows, num_groups * size] bfloat16 or float32; rows may be strided.
        weight: [size], which all groups share, or [num_groups * size].
        gate_first: the norm is that of x * silu(gate).
        out: [num_rows, num_groups * size]; where to put the result.

    Returns:
        [num_rows, num_groups * size], dtype of `x`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or what is written overlaps another tensor.

    Cost: reads both, writes the result; bandwidth bound outside the caches.
    Reference: kernels/reference/norm.py
    """
    check_rows("x", x)
    num_rows, width = x.shape
    check_size("num_groups", num_groups, 1)
    check_size("gate_first", gate_first, 0, 1)
    check_number("eps", eps)
    if width % num_groups:
        raise ShapeError(f"x has rows of {width} elements, expected a multiple of {num_groups} groups", field="x")
    check_tensor("gate", gate, (x.dtype,), (num_rows, width), strided_rows=True)
    check_tensor("weight", weight, (x.dtype,), (-1,))
    size = width // num_groups
    if len(weight) not in (size, width):
        raise ShapeError(f"weight has {len(weight)} elements, expected {size} or {width}", field="weight")
    if out is None:
        out = runtime.empty(num_rows, width, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, width))
        check_apart("out", out, x=x, gate=gate, weight=weight)
    runtime.library.gated_rms_norm(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), weight.data_ptr(),
        size if len(weight) == width else 0, out.data_ptr(), num_rows, num_groups, size, eps, bool(gate_first),
        DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def clamped_silu_and_mul(
    runtime: NativeRuntime,
    x: torch.Tensor,
    limit: float,
    alpha: float = 1.0,
    offset: float = 0.0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate * sigmoid(alpha * gate) * (up + offset), with gates cut at `limit` and ups at -limit and limit.

    Args:
        x: [num_rows, 2 * size] bfloat16 or float32: gates, then ups; rows may be strided.
        out: [num_rows, size]; where to put the result.

    Returns:
        [num_rows, size], dtype of `x`; the first product is rounded to it before the second.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or a number is none.

    Reference: kernels/reference/activation.py
    """
    for name, number in (("limit", limit), ("alpha", alpha), ("offset", offset)):
        check_number(name, number)
    return _gated(runtime, x, _CLAMPED_SILU, out, limit, alpha, offset)


def is_finite(runtime: NativeRuntime, tensor: torch.Tensor) -> bool:
    """Whether no element of `tensor` is NaN or infinite.

    Args:
        tensor: bfloat16, float16 or float32 of any shape, contiguous.

    Raises:
        ShapeError: a dtype, device or stride differs from the above.

    Cost: one read, which ends early when there is something to find.
    """
    check_is_tensor("tensor", tensor)
    check_tensor("tensor", tensor, tuple(_EXPONENT_MASKS), (-1,) * tensor.dim())
    return bool(
        runtime.library.is_finite(
            runtime.tier_idx, runtime.pool, tensor.data_ptr(), tensor.numel(), tensor.element_size(),
            _EXPONENT_MASKS[tensor.dtype],
        )
    )  # fmt: skip


def _gated(
    runtime: NativeRuntime,
    x: torch.Tensor,
    activation: int,
    out: torch.Tensor | None,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    check_rows("x", x)
    num_rows, width = x.shape
    if width % 2:
        raise ShapeError(f"x has rows of {width} elements, expected an even number: gate and up", field="x")
    if out is None:
        out = runtime.empty(num_rows, width // 2, dtype=x.dtype)
    else:
        check_tensor("out", out, (x.dtype,), (num_rows, width // 2))
        check_apart("out", out, x=x)
    runtime.library.gated_activation(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), out.data_ptr(), num_rows, width // 2, activation,
        DTYPE_CODES[x.dtype], limit, alpha, offset,
    )  # fmt: skip
    return out


def _activation(name: str) -> int:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _is_same(out: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether a result takes an input's place, element by element."""
    return other is not None and other.data_ptr() == out.data_ptr() and other.is_contiguous()


def _gate_stride(gate: torch.Tensor, x: torch.Tensor) -> int:
    """Elements from row to row of what multiplies x; 0 where all rows share one."""
    if isinstance(gate, torch.Tensor) and gate.dim() == 1:
        check_tensor("gate", gate, (x.dtype,), (x.shape[1],))
        return 0
    check_tensor("gate", gate, (x.dtype,), tuple(x.shape), strided_rows=True)
    return gate.stride(0)
