"""Latent attention over pages, what writes them, and products with a matrix of each head. Stateless.

A layer's cache is [num_blocks, block_size, latent_size + rope_size], rows of tokens: the normalised latent, then the
rotated part of the key. Called by the `native_cpu` attention backend and the layers.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ShapeError
from quire.kernels.native.attention import BLOCK_SIZE_MULTIPLE, check_heads, is_plain, refuse
from quire.kernels.native.checks import (
    DTYPE_CODES,
    FLOATS,
    check_apart,
    check_is_tensor,
    check_number,
    check_size,
    check_tensor,
)
from quire.kernels.native.linear import packed_shape
from quire.kernels.native.runtime import NativeRuntime

MAX_WIDTH = 4096
"""Of a cached token, in elements: a thread keeps the keys of 256 tokens in its caches."""


def latent_attention(
    runtime: NativeRuntime,
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    latent_size: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each request's newest tokens to the latents of all of its tokens that are not later than the query.

    The bits of a row of the result depend on its query, its position and the latents it sees alone: not on the batch,
    on how its prompt is cut into chunks, on pages and their size, on threads, or on the tier. In bfloat16 the softmax
    weights are rounded to bfloat16.

    Args:
        query: [num_tokens, num_heads, width].
        latent_cache: this step's tokens are in it. Slots that no query sees may hold anything.
        latent_size: leading elements of a cached token, the value of all heads; the whole row is their key.
        block_table: [num_reqs, max_blocks] int32.
        query_start_loc: [num_reqs + 1] int32; request i owns query rows query_start_loc[i] .. query_start_loc[i + 1]
            - 1, its last tokens. Rows past the last request come back as zeros.
        seq_lens: [num_reqs] int32; tokens in the cache.
        scale: factor on the scores, above 0.
        out: [num_tokens, num_heads, latent_size]; written and returned.

    Returns:
        [num_tokens, num_heads, latent_size], dtype of `query`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, or what is
            written overlaps another tensor.

    Cost: 2 * num_heads * (width + latent_size) flops for a query and a token it sees; reads and copies each latent
        once for up to 64 rows (queries times heads).
    Reference: kernels/reference/latent.py
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1; Dao et al. 2022 (FlashAttention), section 3.1.
    """
    if not is_plain(query, torch.bfloat16) or query.dim() != 3:
        check_tensor("query", query, FLOATS, (-1, -1, -1))
    num_tokens, num_heads, width = query.shape
    check_size("num_heads", num_heads, 1)
    cache = native_cache(runtime, latent_cache, latent_size, width, query.dtype)
    if not is_plain(block_table, torch.int32) or block_table.dim() != 2:
        check_tensor("block_table", block_table, (torch.int32,), (-1, -1))
    num_reqs, max_blocks = block_table.shape
    check_tensor("query_start_loc", query_start_loc, (torch.int32,), (num_reqs + 1,))
    check_tensor("seq_lens", seq_lens, (torch.int32,), (num_reqs,))
    check_number("scale", scale)
    if not scale > 0.0:
        raise ShapeError(f"scale is {scale}, expected a number above 0", field="scale")
    if out is None:
        out = runtime.empty(num_tokens, num_heads, latent_size, dtype=query.dtype)
    else:
        check_tensor("out", out, (query.dtype,), (num_tokens, num_heads, latent_size))
    refuse(runtime.library.latent_attention(
        runtime.tier_idx, runtime.pool, query.data_ptr(), out.data_ptr(), cache, block_table.data_ptr(), max_blocks,
        query_start_loc.data_ptr(), seq_lens.data_ptr(), num_reqs, num_tokens, num_heads, scale,
    ))  # fmt: skip
    return out


def write_latent_tokens(
    runtime: NativeRuntime,
    query: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent_cache: torch.Tensor,
) -> None:
    """Write a step's normalised latents and rotated keys to their pages, and rotate the end of its queries.

    Args:
        query: [num_tokens, num_heads, query_size]; the last rope_size elements of each head are rotated; tokens may be
            strided.
        rotated: [num_tokens, num_heads, width]; they become the last elements of each head here, others stay.
        latent: [num_tokens, width]: a latent, then the part of the key to be rotated; rows may be strided.
        norm: [latent_size]; gains.
        cos, sin: [max_positions, rope_size / 2] float32.
        positions: [num_tokens] int64 or int32, below max_positions.
        slot_mapping: [num_tokens] int64: page * block_size + offset, distinct; negative = not written.
        latent_cache: mutated.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of a tensor, or what is
            written overlaps another tensor.

    Cost: one pass over the step's tokens.
    Reference: kernels/reference/latent.py
    """
    check_heads("query", query)
    dtype, (num_tokens, num_heads, query_size) = query.dtype, query.shape
    check_size("num_heads", num_heads, 1)
    check_tensor("norm", norm, (dtype,), (-1,))
    check_tensor("cos", cos, (torch.float32,), (-1, -1))
    check_tensor("sin", sin, (torch.float32,), tuple(cos.shape))
    max_positions, half = cos.shape
    latent_size, width = len(norm), len(norm) + 2 * half
    check_size("query_size", query_size, 2 * half)
    check_tensor("rotated", rotated, (dtype,), (num_tokens, num_heads, width))
    check_tensor("latent", latent, (dtype,), (num_tokens, width), strided_rows=True)
    check_tensor("positions", positions, (torch.int64, torch.int32), (num_tokens,))
    check_tensor("slot_mapping", slot_mapping, (torch.int64,), (num_tokens,))
    check_number("eps", eps)
    cache = native_cache(runtime, latent_cache, latent_size, width, dtype)
    refuse(runtime.library.write_latent_tokens(
        runtime.tier_idx, runtime.pool, query.data_ptr(), query.stride(0), query_size, rotated.data_ptr(),
        latent.data_ptr(), latent.stride(0), norm.data_ptr(), eps, num_tokens, num_heads, cos.data_ptr(),
        sin.data_ptr(), max_positions, positions.data_ptr(), positions.dtype == torch.int64, slot_mapping.data_ptr(),
        cache,
    ))  # fmt: skip


def head_linear(
    runtime: NativeRuntime, x: torch.Tensor, packed: torch.Tensor, output_size: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Each head's vector by a matrix of its own, summed in float32 and rounded once, with the bits of `linear`.

    Args:
        x: [num_tokens, num_heads, input_size] bfloat16 or float32; elements of a head lie together.
        packed: [num_heads, *packed_shape(output_size, input_size)], dtype of `x`.
        out: [num_tokens, num_heads, output_size], written; elements of a head lie together. None = a new tensor.

    Returns:
        [num_tokens, num_heads, output_size].

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: 2 * num_tokens * num_heads * input_size * output_size flops; reads the weights once for few tokens.
    Reference: kernels/reference/latent.py
    """
    check_is_tensor("x", x)
    _check_vectors("x", x, (-1, -1, -1), FLOATS)
    num_tokens, num_heads, input_size = x.shape
    check_size("input_size", input_size, 1)
    check_size("output_size", output_size, 1)
    check_tensor("packed", packed, (x.dtype,), (num_heads, *packed_shape(output_size, input_size, x.dtype)))
    if out is None:
        out = runtime.empty(num_tokens, num_heads, output_size, dtype=x.dtype)
    else:
        _check_vectors("out", out, (num_tokens, num_heads, output_size), (x.dtype,))
        check_apart("out", out, x=x, packed=packed)
    runtime.library.head_linear(
        runtime.tier_idx, runtime.pool, x.data_ptr(), x.stride(0), x.stride(1), packed.data_ptr(), out.data_ptr(),
        out.stride(0), out.stride(1), num_tokens, num_heads, input_size, output_size, DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return out


def native_cache(
    runtime: NativeRuntime, latent_cache: torch.Tensor, latent_size: int, width: int, dtype: torch.dtype
) -> Any:
    """The library's view of a layer's cache; `dtype`: of queries."""
    check_size("width", width, 4, MAX_WIDTH)
    check_size("latent_size", latent_size, 2, width - 2)
    if latent_size % 2 or width % 2:
        raise ShapeError(f"latent_size is {latent_size} of {width}, expected even numbers", field="latent_size")
    if not is_plain(latent_cache, dtype) or latent_cache.dim() != 3 or latent_cache.shape[2] != width:
        check_tensor("latent_cache", latent_cache, (dtype,), (-1, -1, width))
    num_blocks, block_size, _ = latent_cache.shape
    if block_size % BLOCK_SIZE_MULTIPLE or block_size == 0:
        raise ShapeError(
            f"latent_cache has blocks of {block_size} tokens, expected a multiple of {BLOCK_SIZE_MULTIPLE}",
            field="latent_cache",
        )
    return runtime.library.LatentCache(
        latent_cache.data_ptr(), num_blocks, block_size, latent_size, width - latent_size,
        DTYPE_CODES[latent_cache.dtype],
    )  # fmt: skip


def _check_vectors(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse anything but [num_tokens, num_heads, size] whose tokens and heads may be strided, and do not overlap."""
    check_is_tensor(name, tensor)
    is_laid_out = tensor.dim() == 3 and tensor.stride(2) == 1 and tensor.numel() > 0
    if is_laid_out and tensor.stride(1) >= tensor.shape[2]:
        between_tokens = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]
        if tensor.stride(0) >= between_tokens or tensor.shape[0] == 1:
            check_tensor(name, tensor[0], dtypes, shape[1:], strided_rows=True)
            if shape[0] in (-1, len(tensor)):
                return
    check_tensor(name, tensor, dtypes, shape)
