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

    Returns:
        [num_tokens, num_heads, head_size], dtype of `query`, computed in float32.

    Raises:
        ShapeError: a size differs from the above.

    Source: Kwon et al. 2023 (PagedAttention), section 4.1; window as in Jiang et al. 2023 (Mistral 7B), section 2.
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
            keys = _tokens_seen(key_cache, block_table[request], position, sliding_window)
            values = _tokens_seen(value_cache, block_table[request], position, sliding_window)
            output[token] = _attend(query[token], keys, values, scale)
    return output


def _tokens_seen(
    cache: torch.Tensor, block_ids: torch.Tensor, position: int, sliding_window: int | None
) -> torch.Tensor:
    """Keys or values of the tokens that the query at `position` sees: [num_seen, num_kv_heads, head_size]."""
    block_size = cache.shape[1]
    oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    rows = [cache[block_ids[seen // block_size], seen % block_size] for seen in range(oldest, position + 1)]
    return torch.stack(rows).float()


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [num_heads, head_size] over [num_seen, num_kv_heads, head_size]; head h reads key head h // group."""
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    heads = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = keys[:, kv_head] @ query[head].float() * scale
        heads.append(torch.softmax(scores, dim=0) @ values[:, kv_head])
    return torch.stack(heads).to(query.dtype)
