"""Reference: the gated delta rule, token after token, and the gates it takes."""

from __future__ import annotations

import torch

from quire.kernels.recurrent import RecurrentBatch
from quire.kernels.reference.recurrent import each_request


def delta_gates(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of the state stays, and how much of a change is made, per token and head.

    Args:
        b, a: [num_tokens, num_heads].
        a_log, bias: [num_heads] float32.

    Returns:
        (decay, beta), each [num_tokens, num_heads] float32: exp(-exp(a_log) * softplus(a + bias)) and sigmoid(b).

    Source: Yang et al. 2025 (Gated DeltaNet), section 3.4; the decay is that of Dao and Gu 2024 (Mamba-2).
    """
    step = torch.nn.functional.softplus(a.float() + bias)
    return torch.exp(-a_log.exp() * step), torch.sigmoid(b.float())


def gated_delta_rule(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    batch: RecurrentBatch,
    *,
    num_key_heads: int,
    scale: float,
) -> torch.Tensor:
    """Per token and head: decay the state, move what it gives for the key towards the value, read it by the query.

    Args:
        qkv: [num_tokens, 2 * num_key_heads * key_size + num_value_heads * value_size]: queries, keys, values. Queries
            and keys are scaled to length 1; value head h has those of head h // (num_value_heads / num_key_heads).
        decay, beta: [num_tokens, num_value_heads] float32.
        states: [num_blocks, num_value_heads, key_size, value_size] float32; mutated.
        scale: factor on the queries.

    Returns:
        [num_tokens, num_value_heads * value_size], dtype of `qkv`.

    Source: Yang et al. 2025 (Gated DeltaNet), section 3.1, equation 10.
    """
    num_value_heads, key_size, value_size = states.shape[1:]
    keys = num_key_heads * key_size
    query, key, value = qkv.float().tensor_split((keys, 2 * keys), dim=-1)
    query, key = (
        _unit_length(x.reshape(-1, num_key_heads, key_size)).repeat_interleave(num_value_heads // num_key_heads, dim=1)
        for x in (query, key)
    )
    value = value.reshape(-1, num_value_heads, value_size)
    out = torch.empty_like(value)
    for request in each_request(batch, states):
        state = request.before
        for t in range(request.rows.start, request.rows.stop):
            state *= decay[t].view(-1, 1, 1)
            change = beta[t].unsqueeze(1) * (value[t] - (state * key[t].unsqueeze(2)).sum(dim=1))
            state += key[t].unsqueeze(2) * change.unsqueeze(1)
            out[t] = (state * query[t].unsqueeze(2)).sum(dim=1) * scale
            request.leave(t, state)
    return out.to(qkv.dtype).flatten(1)


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension, divided by their length."""
    return x * torch.rsqrt(x.pow(2).sum(dim=-1, keepdim=True) + 1e-6)
