"""Latent attention by the native kernels. Made by the `native_cpu` backend; holds its runtime."""

from __future__ import annotations

import torch

from quire.attention.backend import Rotation
from quire.attention.latent import LatentBackend, LatentParams
from quire.attention.metadata import AttentionMetadata
from quire.kernels.native.latent import latent_attention, write_latent_tokens
from quire.kernels.native.runtime import NativeRuntime


class NativeLatentBackend(LatentBackend):
    """Any mix of decodes and prompt chunks, bfloat16 and float32.

    A token's result has the same bits in every batch and chunking, and on every tier and number of threads.
    """

    def __init__(self, runtime: NativeRuntime) -> None:
        self.runtime = runtime

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int, width: int) -> tuple[int, ...]:
        """[block, token of the block, element]."""
        return (num_blocks, block_size, width)

    def forward(
        self,
        params: LatentParams,
        query: torch.Tensor,
        absorbed: torch.Tensor,
        latent: torch.Tensor,
        gain: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Two kernels. Rows past `metadata.num_tokens` are padding and come back as zeros."""
        num_tokens = metadata.num_tokens
        positions, slots = rotation.positions, metadata.slot_mapping
        if len(query) == num_tokens:  # slices cost more than a short kernel
            tokens, rotated, latents = query, absorbed, latent
        else:
            tokens, rotated, latents = query[:num_tokens], absorbed[:num_tokens], latent[:num_tokens]
        write_latent_tokens(
            self.runtime, tokens, rotated, latents, gain, params.eps, rotation.cos, rotation.sin,
            positions if len(positions) == num_tokens else positions[:num_tokens],
            slots if len(slots) == num_tokens else slots[:num_tokens], kv_cache,
        )  # fmt: skip
        return latent_attention(
            self.runtime, absorbed, kv_cache, params.latent_size, metadata.block_table, metadata.query_start_loc,
            metadata.seq_lens, params.scale,
        )  # fmt: skip
