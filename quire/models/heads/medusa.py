"""Medusa heads: each guesses the token some places behind a hidden state, all at once. Made by `worker.drafting`.

Source: Cai et al. 2024 (Medusa), section 2.1. Checkpoints: config.json with `medusa_num_heads` and `medusa_num_layers`
(or `num_heads`, `num_hidden_layers`), tensors `medusa_head.{head}.{block}.linear.weight` and `.bias`, and after the
blocks `medusa_head.{head}.{blocks}.weight`, the head's output projection; with `original_lm_head` all heads have the
target's. The prefix `medusa_head.` may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quire.config.hf_fields import FieldReader
from quire.config.model_arch import ModelArch
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear
from quire.layers.options import LayerOptions
from quire.layers.weight_target import WeightTarget
from quire.models.heads.files import check_sizes, read_count, read_head_config

PREFIXES = ("medusa_head.", "")
MAX_HEADS = 64
MAX_BLOCKS = 16

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MedusaArch:
    """Heads, residual blocks of each, and whether the output projection is the target's."""

    num_heads: int
    num_blocks: int
    shares_projection: bool


def read_medusa(path: Path, target: ModelArch) -> MedusaArch:
    """The shape of the heads in `path`.

    Raises:
        ModelError: no config.json, or a field that is not as it should be.
        ConfigError: they are those of another model.
    """
    config = read_head_config(path)
    check_sizes(config, target)
    return MedusaArch(
        num_heads=read_count(config, ("medusa_num_heads", "num_heads"), 5, MAX_HEADS),
        num_blocks=read_count(config, ("medusa_num_layers", "num_hidden_layers"), 1, MAX_BLOCKS),
        shares_projection=FieldReader(config).flag("original_lm_head", False),
    )


class MedusaHeads(nn.Module):
    """The heads of a target with these sizes.

    Attributes:
        projections: of each head; empty = the target's.
    """

    def __init__(self, arch: MedusaArch, hidden_size: int, vocab_size: int, options: LayerOptions) -> None:
        super().__init__()
        self.arch = arch
        self.kernels = options.kernels
        self.blocks = nn.ModuleList(
            nn.ModuleList(Linear(hidden_size, hidden_size, bias=True, options=options) for _ in range(arch.num_blocks))
            for _ in range(arch.num_heads)
        )
        num_projections = 0 if arch.shares_projection else arch.num_heads
        self.projections = nn.ModuleList(
            TokenTable(vocab_size, hidden_size, options=options) for _ in range(num_projections)
        )

    def states(self, head: int, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of the target -> [n, hidden_size] before the head's projection."""
        x = hidden_rows
        blocks = self.blocks[head]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = self.kernels.add(x, self.kernels.activate(block(x), "silu"))
        return x

    def logits(self, head: int, states: torch.Tensor, compute_logits: ComputeLogits) -> torch.Tensor:
        """[n, vocab_size] float32 of a head's states; `compute_logits` is the target's."""
        if self.arch.shares_projection:
            return compute_logits(states)
        projection = self.projections[head]
        assert isinstance(projection, TokenTable)
        return projection.logits(states)

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes."""
        return dict(self._targets())

    def _targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for head, blocks in enumerate(self.blocks):
            name = f"{PREFIXES[0]}{head}"
            assert isinstance(blocks, nn.ModuleList)
            for i, block in enumerate(blocks):
                assert isinstance(block, Linear)
                yield from block.targets(f"{name}.{i}.linear")
            if not self.arch.shares_projection:
                projection = self.projections[head]
                assert isinstance(projection, TokenTable)
                yield from projection.targets(f"{name}.{self.arch.num_blocks}")

    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of names that checkpoints may have and the heads do not need."""
        return (rf"^(medusa_head\.)?\d+\.{self.arch.num_blocks}\.weight$",) if self.arch.shares_projection else ()
