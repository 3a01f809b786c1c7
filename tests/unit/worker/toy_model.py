"""A model whose next token is an exact function of its whole context, read back through the blocks.

Its "keys" are the token ids. If a block, a slot, a length or a position is wrong, the next token is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata
from quire.core.kv_spec import FullAttentionSpec, KVCacheSpec
from quire.layers.weight_target import WeightTarget

VOCAB_SIZE = 97


def next_token(context: list[int]) -> int:
    """The likeliest token after `context`."""
    return sum((token_id + 1) * (position + 1) ** 2 for position, token_id in enumerate(context)) % VOCAB_SIZE


class ToyBackend(AttentionBackend):
    """Blocks of token ids."""

    name = "toy"
    preferred_block_size = 4

    @staticmethod
    def unsupported_reasons(params: AttentionParams, dtype: torch.dtype, device: torch.device) -> list[str]:
        return []

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size)

    def copy_pages(self, kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        for kv_cache in kv_caches:
            kv_cache[target_ids] = kv_cache[source_ids]

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        raise NotImplementedError


class ToyModel:
    """Implements `CausalLM`; its hidden states are its logits."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        cache, metadata = context.attention(0)
        assert len(input_ids) == metadata.num_tokens == int(metadata.query_start_loc[-1])
        assert len(set(metadata.slot_mapping.tolist())) == metadata.num_tokens, "slots are distinct"
        cache.view(-1)[metadata.slot_mapping] = input_ids.to(cache.dtype)
        hidden = torch.zeros(metadata.num_tokens, VOCAB_SIZE)
        for i in range(metadata.num_reqs):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            seq_len = int(metadata.seq_lens[i])
            assert positions[start:end].tolist() == list(range(seq_len - (end - start), seq_len))
            ids = cache[metadata.block_table[i].long()].view(-1)[:seq_len].long().tolist()
            for token in range(start, end):
                at = next_token(ids[: seq_len - (end - token) + 1])
                distance = (np.arange(VOCAB_SIZE) - at) % VOCAB_SIZE
                hidden[token] = torch.from_numpy(-0.5 * distance.astype(np.float32))
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return hidden_rows.clone()

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {"toy": FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype_bytes=4)}

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        return {}

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        return {}
