"""The block of latent attention: projections down to queries and latents, attention over latents, output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.attention.context import ForwardContext
from quire.attention.latent import LatentParams
from quire.config.model_arch import LatentAttentionArch
from quire.core.kv_spec import KVCacheSpec, MLAAttentionSpec
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.rope import rows_of_halves
from quire.layers.weight_target import WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.tensor_layouts import linear_targets


class LatentAttentionPart(Part):
    """Multi-head latent attention, with or without compressed queries.

    Attributes:
        down_proj: to queries, or to compressed ones, then to the latent and the shared part of the keys.
        q_b_proj: from compressed queries to queries.
    """

    def __init__(self, build: BuildContext, arch: LatentAttentionArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, hidden_size = build.options, build.arch.hidden_size
        query_size = arch.num_heads * (arch.nope_size + arch.rope_size)
        self.arch = arch
        self.width = arch.latent_size + arch.rope_size
        self.first_size = query_size if arch.query_rank is None else arch.query_rank
        self.down_proj = Linear(hidden_size, self.first_size + self.width, bias=arch.has_bias, options=options)
        if self.down_proj.bias is not None:
            self.down_proj.bias.data.zero_()  # queries that are not compressed have none
        self.q_b_proj: Linear | None = None
        if arch.query_rank is not None:
            self.q_norm = Norm(arch.query_rank, arch.norm, options=options)
            self.q_b_proj = Linear(arch.query_rank, query_size, bias=False, options=options)
        self.latent_norm = Norm(arch.latent_size, arch.norm, options=options)
        self.rotary = build.rotary(arch.rope)
        params = LatentParams(
            num_heads=arch.num_heads, latent_size=arch.latent_size, rope_size=arch.rope_size, scale=arch.scale,
            eps=arch.norm.eps,
        )  # fmt: skip
        place = build.cache_layers.add(f"{name}.attn", self)
        self.attn = LatentAttention(params, arch.nope_size, arch.value_size, build.backend, place, options=options)
        self.o_proj = Linear(arch.num_heads * arch.value_size, hidden_size, bias=arch.has_bias, options=options)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        down = self.down_proj(x)
        query, latent = down[:, : self.first_size], down[:, self.first_size :]
        if self.q_b_proj is not None:
            query = self.q_b_proj(self.q_norm(query))
        attended = self.attn(query, latent, self.latent_norm.weight, self.rotary(positions), context)
        output: torch.Tensor = self.o_proj(attended)
        return output

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        arch, head_size = self.arch, self.arch.nope_size + self.arch.rope_size
        rotated = self._rotated_rows()
        heads = None
        if rotated is not None:
            order = torch.cat([torch.arange(arch.nope_size), arch.nope_size + rotated])
            heads = (torch.arange(arch.num_heads)[:, None] * head_size + order).flatten()
        if self.q_b_proj is None:
            yield from self._down_targets(f"{name}.q_proj", heads, 0, self.first_size)
        else:
            yield from linear_targets(self.down_proj, f"{name}.q_a_proj", num_rows=self.first_size)
            yield from self.q_norm.targets(f"{name}.q_a_layernorm")
            yield from linear_targets(self.q_b_proj, f"{name}.q_b_proj", heads)
        shared = None if rotated is None else torch.cat([torch.arange(arch.latent_size), arch.latent_size + rotated])
        yield from linear_targets(
            self.down_proj, f"{name}.kv_a_proj_with_mqa", shared, first_row=self.first_size, num_rows=self.width
        )
        yield from self.latent_norm.targets(f"{name}.kv_a_layernorm")
        yield f"{name}.kv_b_proj.weight", self.attn.up.target()
        yield from linear_targets(self.o_proj, f"{name}.o_proj")

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """One row for every token."""
        return MLAAttentionSpec(block_size=block_size, head_size=self.width, dtype_bytes=dtype_bytes)

    def _down_targets(
        self, name: str, rows: torch.Tensor | None, first_row: int, num_rows: int
    ) -> Iterator[tuple[str, WeightTarget]]:
        """Of projections without a bias."""
        for target_name, target in linear_targets(self.down_proj, name, rows, first_row=first_row, num_rows=num_rows):
            if target_name.endswith(".weight"):
                yield target_name, target

    def _rotated_rows(self) -> torch.Tensor | None:
        """[rope_size] the stored row of each rotated row where pairs are neighbours; None where they are not."""
        size = self.arch.rope_size
        return rows_of_halves(1, size, size) if self.arch.rope.is_interleaved else None
