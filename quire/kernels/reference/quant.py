"""Reference: weights of 8 and 4 bits, and their product with activations of 8 bits."""

from __future__ import annotations

import torch

# Rows whose largest magnitude is below this count as zero.
LEAST_ABSMAX = 2.0**-96


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row by its largest magnitude, rounding half to even.

    Args:
        x: [num_rows, size].

    Returns:
        q [num_rows, size] int64, -127 .. 127, and scales [num_rows] float32: x is about q * scale. A row that is not
        finite has q 0 and scale NaN.
    """
    wide = x.float()
    absmax = wide.abs().amax(dim=1) if wide.numel() else wide.new_zeros(wide.shape[0])
    is_finite = wide.isfinite().all(dim=1)
    has_scale = is_finite & (absmax >= LEAST_ABSMAX)
    largest = torch.full_like(absmax, 127.0)  # a Python number over a tensor is a rounded reciprocal times the number
    inverse = torch.where(has_scale, largest / absmax, 0.0)
    q = torch.where(has_scale[:, None], torch.round(wide * inverse[:, None]), 0.0)
    scales = torch.where(has_scale, absmax / largest, 0.0)
    return q.long(), torch.where(is_finite, scales, torch.nan)


def linear_int8(
    x: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute x W^T + bias with exact integer sums and a float32 epilogue.

    Args:
        x: [num_tokens, input_size].
        weight_q, weight_scales: [output_size, input_size] integers, [output_size] float32.
        bias: [output_size].
        out_dtype: None = the dtype of `x`.
    """
    q, x_scales = quantize_int8(x)
    sums = exact_product(q, weight_q)
    out = sums.float() * (x_scales[:, None] * weight_scales[None, :])
    return _add_bias(out, bias).to(out_dtype or x.dtype)


def linear_int4(
    x: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scales: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute x W^T + bias: exact integer sums within a group of inputs, float32 over the groups in their order.

    Args:
        x: [num_tokens, input_size].
        weight_q: [output_size, input_size] integers.
        weight_scales: [output_size, num_groups].
        bias: [output_size].
        out_dtype: None = the dtype of `x`.
    """
    q, x_scales = quantize_int8(x)
    total = torch.zeros(x.shape[0], weight_q.shape[0])
    for group in range(weight_scales.shape[1]):
        inputs = slice(group * group_size, (group + 1) * group_size)
        sums = exact_product(q[:, inputs], weight_q[:, inputs])
        total = total + sums.float() * weight_scales[:, group].float()
    return _add_bias(total * x_scales[:, None], bias).to(out_dtype or x.dtype)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a b^T of integers, in float64: exact while sums stay below 2 ** 53."""
    return (a.double() @ b.double().T).long()


def quantize_int4(weight: torch.Tensor, group_size: int, num_candidates: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of each row to -8 .. 7, with the scale of least squared error among many.

    Args:
        weight: [output_size, input_size].
        group_size: inputs that share a scale; the last group may be shorter.
        num_candidates: scales tried per sign.

    Returns:
        q [output_size, input_size] int64 and scales [output_size, num_groups] float64.
    """
    parts, scales = [], []
    for group in torch.split(weight.double(), group_size, dim=1):
        absmax = group.abs().amax(dim=1, keepdim=True)
        best_error = torch.full_like(absmax, torch.inf)
        best_scale = torch.ones_like(absmax)
        for divisor in torch.linspace(6.0, 12.0, num_candidates).tolist():
            for scale in (absmax / divisor, -absmax / divisor):
                safe = torch.where(absmax > 0, scale, 1.0)
                error = (nearest_int4(group, safe) * safe - group).square().sum(dim=1, keepdim=True)
                best_scale = torch.where(error < best_error, safe, best_scale)
                best_error = torch.minimum(error, best_error)
        parts.append(nearest_int4(group, best_scale))
        scales.append(best_scale)
    return torch.cat(parts, dim=1).long(), torch.cat(scales, dim=1)


def nearest_int4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest of -8 .. 7 to weight / scale."""
    return torch.round(weight / scale).clamp(-8, 7)


def _add_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out + bias.float()
