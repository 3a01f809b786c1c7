"""Which heads of an attention layer a rank computes and keeps keys and values of. Called by the attention part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from quire.config.model_arch import AttentionArch
from quire.layers.sharding import Ranges, Shards
from quire.models.interfaces import BuildContext


@dataclass(frozen=True, slots=True)
class OwnHeads:
    """The heads of one rank.

    Attributes:
        arch: the layer as this rank computes it.
        queries: (first, end) of the query heads.
        rows: of the fused projection, in its order: output gates, queries, keys, values.
    """

    arch: AttentionArch
    queries: tuple[int, int]
    rows: Ranges
    shards: Shards

    def all_gather(self, attended: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads, of those of this rank."""
        return self.shards.all_gather(attended, (self.arch.num_heads * self.arch.head_size,) * self.shards.size)


def own_heads(build: BuildContext, arch: AttentionArch) -> OwnHeads | None:
    """This rank's heads; None = every rank computes all, and the projection's outputs are divided as any other's.

    Query heads are divided evenly, key/value heads too; where these are fewer than ranks, each is on several. Heads
    whose norm has gains of its own, and layers that share a cache, are not divided.
    """
    shards = build.options.kernels.shards
    if shards is None:
        return None
    norm, num_ranks = arch.head_norm, shards.size
    has_own_gains = norm is not None and (arch.has_row_norm or norm.is_centered)
    shares = any(layer.shares_cache_of is not None for layer in build.arch.attention_layers)
    is_even = arch.num_heads % num_ranks == 0 and (
        arch.num_kv_heads % num_ranks == 0 or num_ranks % arch.num_kv_heads == 0
    )
    if has_own_gains or shares or not is_even:
        return None
    num_heads, num_kv_heads = arch.num_heads // num_ranks, max(1, arch.num_kv_heads // num_ranks)
    first, first_kv = shards.rank * num_heads, shards.rank * arch.num_kv_heads // num_ranks
    rows, begin = [], 0
    groups = [(arch.num_heads, first, num_heads)] * (2 if arch.has_output_gate else 1)
    for total, own_first, count in [*groups, *[(arch.num_kv_heads, first_kv, num_kv_heads)] * 2]:
        rows.append(((begin + own_first) * arch.head_size, (begin + own_first + count) * arch.head_size))
        begin += total
    slopes = arch.alibi_slopes
    own = dataclasses.replace(
        arch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        alibi_slopes=None if slopes is None else slopes[first : first + num_heads],
    )
    return OwnHeads(own, (first, first + num_heads), tuple(rows), shards)
