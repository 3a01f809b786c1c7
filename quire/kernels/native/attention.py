"""Paged attention, and what writes its pages. Called by the `native_cpu` attention backend; stateless.

A layer's cache is [num_blocks, num_kv_heads, 2, block_size * head_size], zeroed when allocated: the keys and then the
values of one head's page, in the order that the products read them (`unpack_kv_cache` undoes it). Its dtype is that of
queries, keys and values, or with bfloat16 an eight-bit float: numbers are rounded to it as they are written (to the
nearest, of two the even one; beyond the largest number to that number; NaN stays NaN) and read exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import (
    DTYPE_CODES,
    check_is_tensor,
    check_number,
    check_size,
    check_tensor,
)
from quire.kernels.native.runtime import NativeRuntime

FLOATS = (torch.bfloat16, torch.float32)
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK_SIZE_MULTIPLE = 16
MAX_HEAD_SIZE = 512
MAX_HEADS = 1 << 20  # also of a page's tokens


def paged_attention(
    runtime: NativeRuntime,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    chunk: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each request's newest tokens to all of its tokens that are not later than the query.

    The bits of a row of the result depend on its query, its position and the keys and values it sees alone: not on
    the batch, on how its prompt is cut into chunks, on pages and their size, on threads, or on the tier. In bfloat16
    the softmax weights are rounded to bfloat16.

    Args:
        query: [num_tokens, num_heads, head_size]; heads of a token lie together, tokens may be strided.
        kv_cache: this step's tokens are in it. Slots that no query sees may hold anything.
        block_table: [num_reqs, max_blocks] int32; a page that no query sees is not looked up.
        query_start_loc: [num_reqs + 1] int32; request i owns query rows query_start_loc[i] .. query_start_loc[i + 1]
            - 1, its last tokens. Rows past the last request come back as zeros.
        seq_lens: [num_reqs] int32; tokens in the cache.
        scale: factor on the scores.
        sliding_window: tokens a query sees, itself included; None = all.
        chunk: a query sees only tokens of its own chunk of so many, counted from position 0; None = all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 = as they are.
        sinks: [num_heads] float32; one more logit of each head, without a value.
        alibi_slopes: [num_heads] float32; slope * (key position - query position) is added to the scores.
        out: [num_tokens, num_heads, head_size], contiguous; written and returned.

    Returns:
        [num_tokens, num_heads, head_size], dtype of `query`.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of the cache, or what is
            written overlaps another tensor.

    Cost: reads the keys and values seen once per prompt chunk of up to 64 rows; bandwidth bound when decoding.
    Reference: kernels/reference/attention.py
    Source: Kwon et al. 2023 (PagedAttention), section 4.1; Dao et al. 2022 (FlashAttention), section 3.1.
    """
    check_heads("query", query)
    dtype = query.dtype
    num_tokens, num_heads, head_size = query.shape
    cache = native_cache(runtime, kv_cache, head_size, dtype)
    num_kv_heads = kv_cache.shape[1]
    if num_heads % num_kv_heads or num_heads == 0:
        raise ShapeError(
            f"query has {num_heads} heads, expected a multiple of the cache's {num_kv_heads}", field="query"
        )
    if not is_plain(block_table, torch.int32) or block_table.dim() != 2:
        check_tensor("block_table", block_table, (torch.int32,), (-1, -1))
    num_reqs, max_blocks = block_table.shape
    if not is_plain(query_start_loc, torch.int32) or query_start_loc.shape != (num_reqs + 1,):
        check_tensor("query_start_loc", query_start_loc, (torch.int32,), (num_reqs + 1,))
    if not is_plain(seq_lens, torch.int32) or seq_lens.shape != (num_reqs,):
        check_tensor("seq_lens", seq_lens, (torch.int32,), (num_reqs,))
    if out is None:
        out = runtime.empty(num_tokens, num_heads, head_size, dtype=dtype)
    else:
        check_tensor("out", out, (dtype,), (num_tokens, num_heads, head_size))
    if sliding_window is not None:
        check_size("sliding_window", sliding_window, 1)
    if chunk is not None:
        check_size("chunk", chunk, 1)
    check_number("scale", scale)
    check_number("soft_cap", soft_cap)
    refuse(runtime.library.paged_attention(
        runtime.tier_idx, runtime.pool, query.data_ptr(), query.stride(0), out.data_ptr(), cache,
        block_table.data_ptr(), max_blocks, query_start_loc.data_ptr(), seq_lens.data_ptr(), num_reqs, num_tokens,
        num_heads, scale, sliding_window or 0, soft_cap, head_numbers("sinks", sinks, num_heads),
        head_numbers("alibi_slopes", alibi_slopes, num_heads), chunk or 0,
    ))  # fmt: skip
    return out


def rope_and_cache(
    runtime: NativeRuntime,
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    kv_cache: torch.Tensor,
    block_size: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    v_norm: torch.Tensor | None = None,
    norms_last: bool = False,
    query_scales: torch.Tensor | None = None,
    norms_centered: bool = False,
    limit: float = 0.0,
) -> None:
    """Normalise and rotate the queries of a step in place, and write its keys, treated alike, and values to pages.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], or the queries alone where `slot_mapping` is
            None; rows may be strided. The queries are mutated, keys and values left as they are.
        cos, sin: [max_positions, rotary_dim / 2] float32; elements from rotary_dim on are not rotated. None = no
            rotation.
        positions: [num_tokens] int64 or int32, below max_positions; None where neither tables nor scales are given.
        slot_mapping: [num_tokens] int64: page * block_size + offset, distinct; negative = not written. None = nothing
            is written: the layer reads what another one wrote.
        kv_cache: mutated.
        q_norm, k_norm: the weight of an RMS norm of each head, [head_size], or of all heads of a token together,
            [num_heads * head_size] and [num_kv_heads * head_size].
        v_norm: [head_size]; likewise of each value head.
        norms_last: norms of queries and keys follow the rotation; of each head only.
        query_scales: [max_positions] float32; factor on the query of each position, after all else.
        norms_centered: queries and keys have a LayerNorm of each head instead, with gains of all heads, and no bias.
        limit: queries, keys and values are cut at -limit and limit, after the norms and before the rotation; 0 = not.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, an index leads out of a tensor, or what is
            written overlaps another tensor.

    Cost: one pass over the step's tokens.
    Reference: kernels/reference/norm.py, rotary.py and cache.py
    """
    for name, size in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("block_size", block_size)):
        check_size(name, size, 1, MAX_HEADS)
    check_size("head_size", head_size, 2, MAX_HEAD_SIZE)
    check_size("norms_last", norms_last, 0, 1)
    check_size("norms_centered", norms_centered, 0, 0 if norms_last else 1)
    check_number("eps", eps)
    check_number("limit", limit)
    num_written = 0 if slot_mapping is None else 2 * num_kv_heads
    check_tensor("qkv", qkv, FLOATS, (-1, (num_heads + num_written) * head_size), strided_rows=True)
    dtype, num_tokens = qkv.dtype, qkv.shape[0]
    cache = native_cache(runtime, kv_cache, head_size, dtype, (num_kv_heads, block_size))
    max_positions, half = _check_positions(cos, sin, positions, query_scales, num_tokens, head_size)
    if slot_mapping is not None:
        check_tensor("slot_mapping", slot_mapping, (torch.int64,), (num_tokens,))
    has_own_gains = _check_norms(
        q_norm, k_norm, v_norm, dtype, (num_heads, num_kv_heads, head_size), norms_last, norms_centered
    )
    refuse(runtime.library.rope_and_cache(
        runtime.tier_idx, runtime.pool, qkv.data_ptr(), qkv.stride(0), num_tokens, num_heads, _address(cos),
        _address(sin), max_positions, half, _address(positions), positions is None or positions.dtype == torch.int64,
        _address(slot_mapping), _address(q_norm), _address(k_norm), eps, cache, _address(v_norm), bool(norms_last),
        has_own_gains and not norms_centered, slot_mapping is not None, _address(query_scales), bool(norms_centered),
        limit,
    ))  # fmt: skip


def _check_positions(
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    query_scales: torch.Tensor | None,
    num_tokens: int,
    head_size: int,
) -> tuple[int, int]:
    """What `rope_and_cache` looks up by position; returns how many positions there are, and half of what is rotated."""
    max_positions, half = 0, 0
    if cos is not None and sin is not None:
        check_tensor("cos", cos, (torch.float32,), (-1, -1))
        max_positions, half = cos.shape
        check_tensor("sin", sin, (torch.float32,), (max_positions, half))
        if 2 * half > head_size:
            raise ShapeError(f"cos has {half} columns, at most {head_size // 2} fit a head", field="cos")
    elif cos is not None or sin is not None:
        raise ShapeError("cos and sin are given together", field="sin" if sin is None else "cos")
    if query_scales is not None:
        check_tensor("query_scales", query_scales, (torch.float32,), (-1 if cos is None else max_positions,))
        max_positions = len(query_scales)
    if positions is not None:
        check_tensor("positions", positions, (torch.int64, torch.int32), (num_tokens,))
    elif half or query_scales is not None:
        raise ShapeError("positions are missing", field="positions")
    return max_positions, half


def _check_norms(
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    norms_last: bool,
    norms_centered: bool,
) -> bool:
    """Whether norms of queries and keys have gains for every head; `sizes`: heads, key heads, head size."""
    num_heads, num_kv_heads, head_size = sizes
    if v_norm is not None:
        check_tensor("v_norm", v_norm, (dtype,), (head_size,))
    norms = {"q_norm": (q_norm, num_heads), "k_norm": (k_norm, num_kv_heads)}
    has_more = any(isinstance(norm, torch.Tensor) and norm.numel() > head_size for norm, _ in norms.values())
    has_own_gains = (has_more and not norms_last) or bool(norms_centered)
    for name, (norm, heads) in norms.items():
        if norm is not None:
            check_tensor(name, norm, (dtype,), (heads * head_size if has_own_gains else head_size,))
    return has_own_gains


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def reshape_and_cache(
    runtime: NativeRuntime,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write this step's keys and values into their pages, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size]; heads of a token lie together, tokens may be strided.
        kv_cache: mutated.
        slot_mapping: [num_tokens] int64: page * block_size + offset, distinct; negative = not written.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or a slot is out of the cache.

    Cost: one pass over the step's tokens.
    Reference: kernels/reference/cache.py
    """
    check_heads("key", key)
    check_heads("value", value)
    num_tokens, num_kv_heads, head_size = key.shape
    if value.dtype != key.dtype:
        raise ShapeError(f"value is {value.dtype}, expected {key.dtype}", field="value")
    if value.shape != key.shape:
        raise ShapeError(f"value has shape {list(value.shape)}, expected {list(key.shape)}", field="value")
    cache = native_cache(runtime, kv_cache, head_size, key.dtype, (num_kv_heads, None))
    check_tensor("slot_mapping", slot_mapping, (torch.int64,), (num_tokens,))
    refuse(runtime.library.write_kv(
        runtime.tier_idx, runtime.pool, key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), num_tokens,
        slot_mapping.data_ptr(), cache,
    ))  # fmt: skip


def copy_pages(runtime: NativeRuntime, kv_cache: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy pages of a layer's cache onto others.

    Args:
        kv_cache: [num_blocks, ...], contiguous; mutated.
        src_ids, dst_ids: [num_pages] int64; targets are distinct, and none is the source of another copy.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above, or a page is not in the cache.

    Cost: reads and writes the pages; bandwidth bound.
    Reference: kernels/reference/cache.py
    """
    check_tensor("kv_cache", kv_cache, (*FLOATS, *FLOATS_OF_8_BITS), (-1, -1, 2, -1))
    check_tensor("src_ids", src_ids, (torch.int64,), (-1,))
    check_tensor("dst_ids", dst_ids, (torch.int64,), (len(src_ids),))
    num_blocks, num_kv_heads, _, page_size = kv_cache.shape
    cache = runtime.library.KvCache(
        kv_cache.data_ptr(), num_blocks, num_kv_heads, 1, page_size, DTYPE_CODES[kv_cache.dtype]
    )
    refuse(runtime.library.copy_pages(
        runtime.tier_idx, runtime.pool, cache, src_ids.data_ptr(), dst_ids.data_ptr(), len(src_ids)
    ))  # fmt: skip


def unpack_kv_cache(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of a layer's cache, each copied to [num_blocks, block_size, num_kv_heads, head_size]."""
    num_blocks, num_kv_heads, _, page_size = kv_cache.shape
    pair = 1 if kv_cache.dtype == torch.float32 else 2
    keys, values = kv_cache.unbind(2)
    keys = keys.reshape(num_blocks, num_kv_heads, head_size // pair, -1, pair)
    values = values.reshape(num_blocks, num_kv_heads, -1, head_size, pair)
    shape = (num_blocks, page_size // head_size, num_kv_heads, head_size)
    return keys.permute(0, 3, 1, 2, 4).reshape(shape), values.permute(0, 2, 4, 1, 3).reshape(shape)


def native_cache(
    runtime: NativeRuntime,
    kv_cache: torch.Tensor,
    head_size: int,
    dtype: torch.dtype,
    sizes: tuple[int | None, int | None] = (None, None),
) -> Any:
    """The library's view of a layer's cache; `sizes`: num_kv_heads and block_size if known; `dtype`: of queries."""
    check_is_tensor("kv_cache", kv_cache)
    if head_size % 2 or not 2 <= head_size <= MAX_HEAD_SIZE:
        raise ShapeError(f"head_size is {head_size}, expected an even number up to {MAX_HEAD_SIZE}", field="head_size")
    num_kv_heads, block_size = (-1 if size is None else size for size in sizes)
    page_size = block_size * head_size if block_size > 0 else -1
    if kv_cache.dim() != 4 or num_kv_heads > 0 or kv_cache.shape[2] != 2 or not is_plain(kv_cache, dtype):
        allowed = (dtype, *FLOATS_OF_8_BITS) if dtype is torch.bfloat16 else (dtype,)
        check_tensor("kv_cache", kv_cache, allowed, (-1, num_kv_heads, 2, page_size))
    num_blocks, num_kv_heads, _, page_size = kv_cache.shape
    if page_size % (BLOCK_SIZE_MULTIPLE * head_size) or page_size == 0 or num_kv_heads == 0:
        raise ShapeError(
            f"kv_cache has shape {list(kv_cache.shape)}, expected blocks of a multiple of {BLOCK_SIZE_MULTIPLE} tokens "
            f"of {head_size} elements",
            field="kv_cache",
        )
    return runtime.library.KvCache(
        kv_cache.data_ptr(), num_blocks, num_kv_heads, page_size // head_size, head_size, DTYPE_CODES[kv_cache.dtype]
    )


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Contiguous in host memory: asked first, since the full check of a tensor costs more than a short kernel."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.data_ptr() % dtype.itemsize == 0
    )


def check_heads(name: str, tensor: torch.Tensor) -> None:
    """Refuse anything but [num_tokens, num_heads, head_size] whose tokens alone may be strided."""
    check_is_tensor(name, tensor)
    if tensor.dim() == 3 and tensor.dtype in FLOATS and tensor.is_cpu:
        num_tokens, num_heads, head_size = tensor.shape
        between_tokens, between_heads, between_elements = tensor.stride()
        is_token_whole = between_elements == 1 and (between_heads == head_size or num_heads <= 1)
        is_aligned = tensor.data_ptr() % tensor.itemsize == 0
        if is_aligned and is_token_whole and (between_tokens >= num_heads * head_size or num_tokens <= 1):
            return
    check_tensor(name, tensor, FLOATS, (-1, -1, -1))


def head_numbers(name: str, tensor: torch.Tensor | None, num_heads: int) -> int:
    """The address of one float32 number per head, or 0."""
    if tensor is None:
        return 0
    check_tensor(name, tensor, (torch.float32,), (num_heads,))
    return tensor.data_ptr()


def refuse(fault: str | None) -> None:
    """Raise what the library found in the indices it was given."""
    if fault is not None:
        raise ShapeError(
            fault, hint="indices of one step must belong to one cache and one batch, and its tensors must not overlap"
        )
