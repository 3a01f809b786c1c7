"""What a training step computes between its matrix products, each with its own backward pass.

On CPU cores the products of `leaf` run near the speed of the hardware; what surrounds them took three quarters of a
step when autograd recorded it operation by operation. These functions keep less, pass over memory less often, and are
the operations of model.py up to rounding (tests/training/test_fused.py compares them). Elementwise work is in float32,
which CPUs do faster than bfloat16; products are in the type of their inputs. No state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CACHED = 2**18  # elements that are in float32 at a time where many are: they stay in the cache


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of the last axis of `x` [..., size], [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _rms_norm_backward(grad: Tensor, normed: Tensor, inverse: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input (in the memory of `grad`) and of the gain before its sum over rows; all [..., size]."""
    products = grad * normed
    mean = (products * gain).mean(-1, keepdim=True)
    return grad.mul_(gain).addcmul_(normed, mean, value=-1).mul_(inverse), products


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, inverse, gain)
        return (wide * inverse).mul_(gain).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain = ctx.saved_tensors
        normed = x.float() * inverse
        dx, products = _rms_norm_backward(grad.to(torch.float32, copy=True), normed, inverse, gain)
        return dx.to(x.dtype), products.flatten(0, -2).sum(0), None, None


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square normalisation of `x` [..., size] with `gain` [size] float32; the result has `dtype`."""
    return _RMSNorm.apply(x, gain, eps, dtype)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turns the pairs of `x` [batch, time, groups, heads, dim] in place: (0, 1), (2, 3), ..."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(turns)
    return x


def _attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Causal softmax of `q` [batch, heads * time, dim] times `k` [batch, time, dim]; [batch, heads * time, time]."""
    scores = torch.bmm(q, k.mT)
    rows, t = scores.shape[1:]
    masked = torch.full((t, t), float("-inf"), device=q.device).triu_(1).repeat(rows // t, 1)
    for part in scores.split(max(1, CACHED // (rows * t))):
        part.copy_(part.float().add_(masked).softmax(-1))
    return scores


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, q_gain: Tensor, k_gain: Tensor, turns: Tensor, eps: float) -> Tensor:
        b, t, groups, n, d = y.shape
        heads = n - 2
        wide = y[..., :-1, :].float()
        inverse = _inverse_rms(wide, eps)
        normed = wide * inverse
        gain = torch.cat(((q_gain * d**-0.5).expand(heads, d), k_gain[None]))
        x = y.new_empty(b, groups, n, t, d)  # per group of heads: queries, key, value
        by_time = x.permute(0, 3, 1, 2, 4)
        by_time[..., :-1, :] = _rotate(normed * gain, turns)
        by_time[..., -1, :] = y[..., -1, :]
        q, k, v = _split(x)
        weights = _attention_weights(q, k)
        ctx.save_for_backward(x, weights, normed, inverse, gain, turns)
        return torch.bmm(weights, v).view(b, groups, heads, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, normed, inverse, gain, turns = ctx.saved_tensors
        b, groups, n, t, d = x.shape
        heads = n - 2
        q, k, v = _split(x)
        grad = grad.view(b, t, groups, heads, d).permute(0, 2, 3, 1, 4).reshape(q.shape)
        dy = x.new_empty(b, t, groups, n, d)
        dy[..., -1, :] = torch.bmm(weights.mT, grad).view(b, groups, t, d).transpose(1, 2)
        scores = torch.ops.aten._softmax_backward_data(torch.bmm(grad, v.mT), weights, -1, weights.dtype)
        wide = torch.empty_like(normed)
        wide[..., :-1, :] = torch.bmm(scores, k).view(b, groups, heads, t, d).permute(0, 3, 1, 2, 4)
        wide[..., -1, :] = torch.bmm(scores.mT, q).view(b, groups, t, d).transpose(1, 2)
        wide = _rotate(wide, turns.conj())
        dy[..., :-1, :], products = _rms_norm_backward(wide, normed, inverse, gain)
        by_head = products.flatten(0, 2).sum(0)
        return dy, by_head[:-1].sum(0) * d**-0.5, by_head[-1], None, None


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of `x` [batch, groups, heads + 2, time, dim]: queries, one head after another, key and value of a group."""
    b, groups, n, t, d = x.shape
    return x[:, :, :-2].view(b * groups, (n - 2) * t, d), x[:, :, -2].flatten(0, 1), x[:, :, -1].flatten(0, 1)


def attention(y: Tensor, q_gain: Tensor, k_gain: Tensor, turns: Tensor, eps: float) -> Tensor:
    """Grouped-query causal attention: norms of queries and keys, rotary embedding, weights, weighted values.

    Args:
        y: Projections [batch, time, groups, heads of a group + 2, dim]: queries of a group, its key, its value. The
            pairs that the rotary embedding turns lie side by side in queries and keys, so also in the gains.
        q_gain: Of the norm of queries, [dim] float32.
        k_gain: Of the norm of keys, the same.
        turns: The embedding as complex numbers, [time, dim / 2] complex64.
        eps: Of the norms.

    Returns:
        [batch, time, groups * heads * dim] in the type of `y`.
    """
    return _Attention.apply(y, q_gain, k_gain, turns[:, None, None], eps)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        for into, part in zip(_parts(out), _parts(both)):
            gate, up = part.float().chunk(2, dim=-1)
            into.copy_(F.silu(gate).mul_(up))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        for into, part, wanted in zip(_parts(out), _parts(both), _parts(grad.contiguous())):
            gate, up = part.float().chunk(2, dim=-1)
            d_gate, d_up = into.chunk(2, dim=-1)
            wide = wanted.float()
            d_up.copy_(F.silu(gate).mul_(wide))
            d_gate.copy_(torch.ops.aten.silu_backward(up.mul_(wide), gate))
        return out


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Views of 256 rows each of `x` [..., size]: in float32 they stay in the cache."""
    return x.view(-1, x.shape[-1]).split(256)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of `both` [..., 2 * size]: gate, then up."""
    return _SwiGLU.apply(both)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        used = weights.flatten().nonzero().squeeze(1)
        rows = hidden.flatten(0, -2).index_select(0, used)
        share = (weights / weights.sum()).flatten()[used].unsqueeze(1)
        losses = torch.empty_like(share)
        logits = rows @ matrix.mT
        split = (x.split(128) for x in (logits, targets.flatten()[used].unsqueeze(1), share, losses))
        for part, wanted, scale, loss in zip(*split):
            likely = part.float().softmax(-1)
            right = likely.gather(1, wanted)
            loss.copy_(right.clamp(min=torch.finfo(right.dtype).tiny).log_().neg_())
            part.copy_(likely.scatter_(1, wanted, right - 1).mul_(scale))
        gradient = torch.zeros_like(hidden)
        gradient.view(-1, hidden.shape[-1]).index_copy_(0, used, logits @ matrix)
        ctx.save_for_backward(gradient, logits.mT @ rows)
        each = torch.zeros_like(weights)
        each.view(-1).index_copy_(0, used, losses.squeeze(1))
        ctx.mark_non_differentiable(each)
        return (losses * share).sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, matrix = ctx.saved_tensors
        return hidden * grad, matrix * grad, None, None


def cross_entropy(hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean of cross-entropies of `hidden @ matrix.T`.

    Its gradients are computed here, so that no logits are kept; rows of weight 0 are not computed.

    Args:
        hidden: Final hidden states [..., hidden].
        matrix: Output matrix [vocab, hidden], in the type of `hidden`.
        targets: Token ids [...].
        weights: Of the rows, [...] float32, not all 0.

    Returns:
        The mean, and the cross-entropy of each row, [...] float32 (0 where its weight is), which has no gradient.
    """
    return _CrossEntropy.apply(hidden, matrix, targets, weights)


class _SoftCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, wanted: Tensor) -> Tensor:
        losses, difference = wanted.new_empty(len(given)), torch.empty_like(given)
        for part, want, loss, into in zip(*(x.split(128) for x in (given, wanted, losses, difference))):
            log = part.float().log_softmax(-1)
            loss.copy_((want * log).sum(-1).neg_())
            into.copy_(log.exp_().sub_(want))
        ctx.save_for_backward(difference)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad.unsqueeze(1).to(difference.dtype), None


def soft_cross_entropy(given: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of logits `given` and distributions `wanted` (float32), both [rows, vocab]; [rows] float32."""
    return _SoftCrossEntropy.apply(given, wanted)
