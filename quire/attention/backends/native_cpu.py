"""Attention by the native kernels: one call per layer, on the library's own threads and in its own block layout.

Made with the native CPU operations, called by every attention layer. Holds the runtime; no state of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.backend import AttentionBackend, AttentionParams, HeadNorms, Rotation
from quire.attention.block_sizes import PREFERRED_BLOCK_SIZES
from quire.attention.latent import LatentBackend, ServesLatents
from quire.attention.latent_native import NativeLatentBackend
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


class NativeCpuBackend(AttentionBackend, ServesLatents):
    """Any mix of decodes and prompt chunks, and every kind of layer that `AttentionParams` describes.

    A token's result has the same bits in every batch and chunking, and on every tier and number of threads.
    """

    name = "native_cpu"
    preferred_block_size = PREFERRED_BLOCK_SIZES[name]

    def __init__(self, runtime: NativeRuntime) -> None:
        self.runtime = runtime
        self._slopes: dict[tuple[float, ...], torch.Tensor] = {}

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
            blocks = kv_cache.view(len(kv_cache), 1, 2, -1)  # of keys and values, or of latents
            copy_pages(self.runtime, blocks, source_ids, target_ids)
            if self.sparse is not None:
                self.sparse.blocks_changed(kv_cache, target_ids)

    def copy_slots(self, kv_cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> None:
        """As `AttentionBackend.copy_slots`, in the blocks of the kernels."""
        elements = kv_cache if kv_cache.itemsize > 1 else kv_cache.view(torch.uint8)
        pair, head_size = 1 if kv_cache.dtype is torch.float32 else 2, kv_cache.shape[-1] // block_size
        num_blocks, num_heads = kv_cache.shape[:2]
        keys = elements[:, :, 0].view(num_blocks, num_heads, head_size // pair, block_size, pair)
        values = elements[:, :, 1].view(num_blocks, num_heads, block_size // pair, head_size, pair)
        (source, target), (from_, to) = slots // block_size, slots % block_size
        keys[target, :, :, to] = keys[source, :, :, from_]
        values[target, :, to // pair, :, to % pair] = values[source, :, from_ // pair, :, from_ % pair]

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """As `AttentionBackend.read_keys`, from the blocks of the kernels."""
        pair, num_heads = 1 if kv_cache.dtype is torch.float32 else 2, kv_cache.shape[1]
        assert self.sparse is not None, "read for it"
        keys = kv_cache[block_ids, :, 0].view(len(block_ids), num_heads, -1, self.sparse.block_size, pair)
        return keys.transpose(2, 3).flatten(3).float()

    def latent_backend(self) -> LatentBackend:
        """On the same runtime."""
        return NativeLatentBackend(self.runtime)

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values to their slots, then attend causally over each request's blocks.

        Rows of `query` past `metadata.num_tokens` are padding and come back as zeros.
        """
        num_tokens = metadata.num_tokens
        slots = metadata.slot_mapping[:num_tokens]
        if key is not None and value is not None:
            reshape_and_cache(self.runtime, key[:num_tokens], value[:num_tokens], kv_cache, slots)
        if metadata.copied_slots is not None:
            self.copy_slots(kv_cache, kv_cache.shape[-1] // params.head_size, metadata.copied_slots)
        return self._attend(params, query, kv_cache, metadata, sinks)

    def forward_fused(
        self,
        params: AttentionParams,
        qkv: torch.Tensor,
        rotation: Rotation | None,
        head_norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The whole attention block between its two projections, in two passes; overwrites the queries in `qkv`.

        Rows past `metadata.num_tokens` come back as zeros.

        Raises:
            ShapeError: a size, dtype, device or stride differs from the interface's, or an index leads out of a tensor.
        """
        num_tokens, num_heads, head_size = metadata.num_tokens, params.num_heads, params.head_size
        tokens = qkv if len(qkv) == num_tokens else qkv[:num_tokens]  # a slice costs more than a short kernel
        slots = None if params.shares_kv else _first(metadata.slot_mapping, num_tokens)
        cos, sin, positions, query_scales = (
            (None, None, None, None) if rotation is None
            else (rotation.cos, rotation.sin, _first(rotation.positions, num_tokens), rotation.query_scales)
        )  # fmt: skip
        q_norm, k_norm, v_norm, eps, norms_last, norms_centered = (
            (None, None, None, 0.0, False, False) if head_norms is None
            else (
                head_norms.query, head_norms.key, head_norms.value, head_norms.eps, head_norms.after_rotation,
                head_norms.is_centered,
            )
        )  # fmt: skip
        rope_and_cache(
            self.runtime, tokens, num_heads, params.num_kv_heads, head_size, cos, sin, positions, slots, kv_cache,
            kv_cache.shape[-1] // head_size, q_norm, k_norm, eps, v_norm=v_norm, norms_last=norms_last,
            query_scales=query_scales, norms_centered=norms_centered, limit=params.limit,
        )  # fmt: skip
        if metadata.copied_slots is not None:
            self.copy_slots(kv_cache, kv_cache.shape[-1] // head_size, metadata.copied_slots)
        query = qkv[:, : num_heads * head_size].view(-1, num_heads, head_size)
        return self._attend(params, query, kv_cache, metadata, sinks).flatten(1)

    def _attend(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        sparse = self.sparse
        if sparse is not None:
            metadata = self.select_blocks(params, query, kv_cache, metadata)
        output = paged_attention(
            self.runtime, query, kv_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens,
            params.scale, sliding_window=params.sliding_window, chunk=params.chunk, soft_cap=params.soft_cap,
            sinks=sinks, alibi_slopes=self._slopes_of(params),
        )  # fmt: skip
        return output if sparse is None else sparse.attention_finished(output, kv_cache)

    def _slopes_of(self, params: AttentionParams) -> torch.Tensor | None:
        """As a tensor that lives as long as the backend: recorded steps read it."""
        if params.alibi_slopes is None:
            return None
        if params.alibi_slopes not in self._slopes:
            self._slopes[params.alibi_slopes] = torch.tensor(params.alibi_slopes, dtype=torch.float32)
        return self._slopes[params.alibi_slopes]


def _first(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A slice costs more than a short kernel."""
    return tensor if len(tensor) == num_tokens else tensor[:num_tokens]
