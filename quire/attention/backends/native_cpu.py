"""Attention by the native kernels: one call per layer, on the library's own threads and in its own block layout.

Made with the native CPU operations, called by every attention layer. Holds the runtime; no state of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.backend import AttentionBackend, AttentionParams, HeadNorms, Rotation
from quire.attention.block_sizes import PREFERRED_BLOCK_SIZES
from quire.attention.metadata import AttentionMetadata
from quire.errors import NativeLibraryError
from quire.kernels.native.attention import (
    FLOATS,
    MAX_HEAD_SIZE,
    copy_pages,
    paged_attention,
    reshape_and_cache,
    rope_and_cache,
)
from quire.kernels.native.library import load_library
from quire.kernels.native.runtime import NativeRuntime


class NativeCpuBackend(AttentionBackend):
    """Any mix of decodes and prompt chunks, grouped-query heads, sliding windows.

    A token's result has the same bits in every batch and chunking, and on every tier and number of threads.
    """

    name = "native_cpu"
    preferred_block_size = PREFERRED_BLOCK_SIZES[name]

    def __init__(self, runtime: NativeRuntime) -> None:
        self.runtime = runtime

    @classmethod
    def try_create(cls) -> None:
        """None: it takes a runtime."""
        return None

    @staticmethod
    def unsupported_reasons(params: AttentionParams, dtype: torch.dtype, device: torch.device) -> list[str]:
        """The processor's own memory, bfloat16 and float32, even head sizes, and a library that was built."""
        reasons = []
        if device.type != "cpu":
            reasons.append(f"device {device.type} is not cpu")
        if dtype not in FLOATS:
            reasons.append(f"dtype {dtype} is not one of {', '.join(map(str, FLOATS))}")
        if params.head_size % 2 or not 2 <= params.head_size <= MAX_HEAD_SIZE:
            reasons.append(f"head_size {params.head_size} is not an even number up to {MAX_HEAD_SIZE}")
        try:
            load_library()
        except NativeLibraryError as error:
            reasons.append(str(error))
        return reasons

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """[block, head, keys or values, elements of the head's block]; the block size is a multiple of 16."""
        return (num_blocks, num_kv_heads, 2, block_size * head_size)

    def copy_pages(self, kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Copy blocks onto others in every layer's cache, by the kernel."""
        for kv_cache in kv_caches:
            copy_pages(self.runtime, kv_cache, source_ids, target_ids)

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write this step's keys and values to their slots, then attend causally over each request's blocks.

        Rows of `query` past `metadata.num_tokens` are padding and come back as zeros.
        """
        num_tokens = metadata.num_tokens
        slots = metadata.slot_mapping[:num_tokens]
        reshape_and_cache(self.runtime, key[:num_tokens], value[:num_tokens], kv_cache, slots)
        return self._attend(params, query, kv_cache, metadata)

    def forward_fused(
        self,
        params: AttentionParams,
        qkv: torch.Tensor,
        rotation: Rotation,
        head_norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The whole attention block between its two projections, in two passes; overwrites the queries in `qkv`.

        Rows past `metadata.num_tokens` come back as zeros.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the interface's, or an index leads out of a tensor.
        """
        num_tokens, num_heads, head_size = metadata.num_tokens, params.num_heads, params.head_size
        tokens = qkv if len(qkv) == num_tokens else qkv[:num_tokens]  # a slice costs more than a short kernel
        positions, slots = rotation.positions, metadata.slot_mapping
        q_norm, k_norm, eps = (
            (None, None, 0.0) if head_norms is None else (head_norms.query, head_norms.key, head_norms.eps)
        )
        rope_and_cache(
            self.runtime, tokens, num_heads, params.num_kv_heads, head_size, rotation.cos, rotation.sin,
            positions if len(positions) == num_tokens else positions[:num_tokens],
            slots if len(slots) == num_tokens else slots[:num_tokens], kv_cache,
            kv_cache.shape[-1] // head_size, q_norm, k_norm, eps,
        )  # fmt: skip
        query = qkv[:, : num_heads * head_size].view(-1, num_heads, head_size)
        return self._attend(params, query, kv_cache, metadata).flatten(1)

    def _attend(
        self, params: AttentionParams, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return paged_attention(
            self.runtime, query, kv_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens,
            params.scale, sliding_window=params.sliding_window,
        )  # fmt: skip
