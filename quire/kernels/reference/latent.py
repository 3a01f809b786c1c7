"""Reference: latent attention over pages, what writes them, and products with a matrix of each head."""

from __future__ import annotations

import torch

from quire.kernels.reference.linear import linear_in_order
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.rotary import rotary_embedding
from quire.utils.shapes import check_shapes


def latent_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    latent_size: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend from each request's newest tokens to the latents of all of its tokens that are not later than the query.

    Args:
        query: [num_tokens, num_heads, width]; request i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1, its
            last tokens.
        latent_cache: [num_blocks, block_size, width]; a token's row is the key of all heads, and its first
            `latent_size` elements are their value.
        block_table: [num_reqs, max_blocks_per_req].
        query_start_loc: [num_reqs + 1].
        seq_lens: [num_reqs]; tokens in the cache.
        scale: factor on the scores.

    Returns:
        [num_tokens, num_heads, latent_size], dtype of `query`, computed in float32 (float64 inputs: in float64).

    Raises:
        ShapeError: a size differs from the above.

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1, with the up-projections absorbed into queries and outputs.
    """
    check_shapes(
        query=(query, "num_tokens num_heads width"),
        latent_cache=(latent_cache, "num_blocks block_size width"),
        block_table=(block_table, "num_reqs max_blocks_per_req"),
        seq_lens=(seq_lens, "num_reqs"),
    )
    output = query.new_zeros(*query.shape[:2], latent_size)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        latents = latent_cache[block_table[request].long()].flatten(0, 1)
        for token in range(first, last):
            seen = latents[: seq_len - (last - token) + 1]
            seen = seen.to(torch.promote_types(seen.dtype, torch.float32))
            weights = torch.softmax(query[token].to(seen.dtype) @ seen.T * scale, dim=1)
            output[token] = (weights @ seen[:, :latent_size]).to(query.dtype)
    return output


def write_latent_tokens(
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent_cache: torch.Tensor,
) -> torch.Tensor:
    """Write this step's normalised latents and rotated keys into their pages, in place, and rotate its queries.

    Args:
        query_rope: [num_tokens, num_heads, rope_size]; the part of the queries that carries the position.
        latent: [num_tokens, width]: a latent, then the part of the key that carries the position.
        norm: [latent_size]; gains of the latents' norm.
        cos, sin: [num_tokens, 1, rope_size / 2] float32.
        slot_mapping: [num_tokens] int64; distinct, negative = not written.
        latent_cache: [num_blocks, block_size, width]; mutated.

    Returns:
        [num_tokens, num_heads, rope_size]: the rotated queries.
    """
    latent_size = len(norm)
    normed = rms_norm(latent[:, :latent_size], norm, eps)
    rotated = rotary_embedding(latent[:, None, latent_size:], cos, sin).squeeze(1)
    is_written = slot_mapping >= 0
    rows = torch.cat((normed, rotated), dim=1)[is_written]
    latent_cache.flatten(0, 1).index_copy_(0, slot_mapping[is_written], rows)
    return rotary_embedding(query_rope, cos, sin)


def head_linear_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's vector by a matrix of its own, in float32 and in the order of `linear_in_order`.

    Args:
        x: [num_tokens, num_heads, input_size].
        weight: [num_heads, output_size, input_size].

    Returns:
        [num_tokens, num_heads, output_size] float32.
    """
    heads = [linear_in_order(x[:, head], weight[head]) for head in range(len(weight))]
    return torch.stack(heads, dim=1)
