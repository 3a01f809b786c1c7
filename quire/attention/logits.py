"""Attention of layers that do more with scores than scale them, in plain torch. Called by the reference backend."""

from __future__ import annotations

import torch

from quire.attention.backend import AttentionParams


def has_plain_logits(params: AttentionParams, sinks: torch.Tensor | None) -> bool:
    """Whether scaled scores are all that the softmax is taken of."""
    return not params.soft_cap and params.alibi_slopes is None and sinks is None


def attend_by_logits(
    params: AttentionParams,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_seen: torch.Tensor,
    distances: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step: scale, cap, slope, mask, softmax with sinks, average.

    Args:
        query: [..., num_kv_heads, group, num_queries, head_size]; head h is kv head h // group.
        keys, values: [..., num_kv_heads, 1, num_keys, head_size].
        is_seen: bool, of the shape [..., 1, 1, num_queries, num_keys].
        distances: of that shape; key position - query position.
        sinks: [num_heads], or None.

    Returns:
        Like `query`; scores and softmax are float32.
    """
    per_head = (params.num_kv_heads, -1, 1, 1)
    logits = query.float() @ keys.float().transpose(-1, -2) * params.scale
    if params.soft_cap:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, device=query.device).view(per_head)
        logits = logits + slopes * distances
    logits = logits.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().view(per_head).expand(*logits.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)
