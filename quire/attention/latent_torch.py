"""Latent attention in plain torch operations. Made by the `torch_reference` backend; stateless."""

from __future__ import annotations

import torch

from quire.attention.backend import Rotation
from quire.attention.latent import LatentBackend, LatentParams
from quire.attention.metadata import AttentionMetadata
from quire.kernels.reference.norm import rms_norm


class TorchLatentBackend(LatentBackend):
    """Any mix of decodes and prompt chunks, on any device; request by request."""

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int, width: int) -> tuple[int, ...]:
        """[1, block, token of the block, element]: blocks are counted by the dimension that counts those of keys."""
        return (1, num_blocks, block_size, width)

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
        """Rows past `metadata.num_tokens` are padding and come back as zeros."""
        num_tokens, size = metadata.num_tokens, params.latent_size
        absorbed[..., size:] = rotation.rotate(query[..., -params.rope_size :])
        keys = rotation.rotate(latent[:, None, size:]).squeeze(1)
        rows = torch.cat((rms_norm(latent[:, :size], gain, params.eps), keys), dim=1)
        tokens = kv_cache.flatten(0, 2)
        tokens.index_copy_(0, metadata.slot_mapping[:num_tokens], rows[:num_tokens])
        output = absorbed.new_zeros(len(absorbed), params.num_heads, size)
        for request in range(metadata.num_reqs):
            start, end = (int(row) for row in metadata.query_start_loc_np[request : request + 2])
            seq_len = int(metadata.seq_lens_np[request])
            num_blocks = -(-seq_len // kv_cache.shape[2])
            blocks = kv_cache[0].index_select(0, metadata.block_table[request, :num_blocks])
            output[start:end] = _attend(params, absorbed[start:end], blocks.flatten(0, 1)[:seq_len])
        return output


def _attend(params: LatentParams, query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The newest tokens of one request over all of them, [query_len, num_heads, latent_size], in float32."""
    wide, query_len, seq_len = tokens.float(), len(query), len(tokens)
    scores = (query.float() @ wide.T) * params.scale
    positions = torch.arange(seq_len - query_len, seq_len, device=query.device)
    is_later = torch.arange(seq_len, device=query.device) > positions[:, None]
    weights = torch.softmax(scores.masked_fill(is_later[:, None], float("-inf")), dim=-1)
    return (weights @ wide[:, : params.latent_size]).to(query.dtype)
