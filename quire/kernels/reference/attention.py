"""Reference: causal attention over paged keys and values, one query of one head at a time."""

from __future__ import annotations

import torch

from quire.utils.shapes import check_shapes


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    *,
    chunk: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each request's newest tokens to all of its tokens that are not later than the query.

    Args:
        query: [num_tokens, num_heads, head_size]; request i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1,
            its last tokens.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size]; this step's tokens are in them.
        block_table: [num_reqs, max_blocks_per_req]; page of each block of tokens.
        query_start_loc: [num_reqs + 1].
        seq_lens: [num_reqs]; tokens in the cache.
        scale: factor on the scores.
        sliding_window: tokens a query sees, itself included; None = all.
        chunk: a query sees only tokens of its own chunk of so many, counted from position 0; None = all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 = as they are.
        sinks: [num_heads]; one more logit of each head, without a value.
        alibi_slopes: [num_heads]; slope * (key position - query position) is added to the scores.

    Returns:
        [num_tokens, num_heads, head_size], dtype of `query`, computed in float32 (float64 inputs: in float64).

    Raises:
        ShapeError: a size differs from the above.

    Source: Kwon et al. 2023 (PagedAttention), section 4.1; window as in Jiang et al. 2023 (Mistral 7B), section 2;
        soft cap as in Gemma Team 2024 (Gemma 2), section 2; sinks as in Agarwal et al. 2025 (gpt-oss), section 2;
        slopes as in Press et al. 2022 (ALiBi), section 3; chunks as in Llama 4 (Meta 2025), as released.
    """
    check_shapes(
        query=(query, "num_tokens num_heads head_size"),
        key_cache=(key_cache, "num_blocks block_size num_kv_heads head_size"),
        value_cache=(value_cache, "num_blocks block_size num_kv_heads head_size"),
        block_table=(block_table, "num_reqs max_blocks_per_req"),
        seq_lens=(seq_lens, "num_reqs"),
    )
    output = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        for token in range(first, last):
            position = seq_len - (last - token)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            oldest = oldest if chunk is None else max(oldest, position // chunk * chunk)
            keys = _tokens_seen(key_cache, block_table[request], oldest, position)
            values = _tokens_seen(value_cache, block_table[request], oldest, position)
            distances = torch.arange(1 - keys.shape[0], 1, dtype=keys.dtype)
            logits = _logits(query[token].to(keys.dtype), keys, scale)
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            if alibi_slopes is not None:
                logits = logits + alibi_slopes[:, None].to(keys) * distances.to(keys)
            output[token] = _average(logits, values, sinks).to(query.dtype)
    return output


def _tokens_seen(cache: torch.Tensor, block_ids: torch.Tensor, oldest: int, position: int) -> torch.Tensor:
    """Keys or values of the tokens oldest .. position: [num_seen, num_kv_heads, head_size]."""
    block_size = cache.shape[1]
    rows = [cache[block_ids[seen // block_size], seen % block_size] for seen in range(oldest, position + 1)]
    seen = torch.stack(rows)
    return seen.to(torch.promote_types(seen.dtype, torch.float32))


def _logits(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """[num_heads, num_seen] of one query [num_heads, head_size]; head h reads key head h // group."""
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    group = num_heads // num_kv_heads
    return torch.stack([keys[:, head // group] @ query[head] * scale for head in range(num_heads)])


def _average(logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Values [num_seen, num_kv_heads, head_size] weighted by the softmax of each head's logits and its sink."""
    num_heads, num_seen = logits.shape
    group = num_heads // values.shape[1]
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None].to(logits)), dim=1)
    weights = torch.softmax(logits, dim=1)[:, :num_seen]
    return torch.stack([weights[head] @ values[:, head // group] for head in range(num_heads)])
