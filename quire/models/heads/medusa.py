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
from quire.models.tensor_layouts import linear_targets

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
    """The heads of a target with these sizes. The first block of all heads is one product, as they share its input.

    Attributes:
        projections: of each head; empty = the target's.
        dtype: of hidden states.
    """

    def __init__(self, arch: MedusaArch, hidden_size: int, vocab_size: int, options: LayerOptions) -> None:
        super().__init__()
        self.arch = arch
        self.hidden_size = hidden_size
        self.kernels = options.kernels
        self.dtype = options.dtype
        self.first = Linear(hidden_size, arch.num_heads * hidden_size, bias=True, options=options)
        self.later = nn.ModuleList(
            nn.ModuleList(Linear(hidden_size, hidden_size, bias=True, options=options) for _ in range(arch.num_heads))
            for _ in range(arch.num_blocks - 1)
        )
        num_projections = 0 if arch.shares_projection else arch.num_heads
        self.projections = nn.ModuleList(
            TokenTable(vocab_size, hidden_size, options=options) for _ in range(num_projections)
        )

    def states(self, hidden_rows: torch.Tensor, repeated: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden_size] of the target -> [n, num_heads, hidden_size] before the projections.

        Args:
            repeated: [n, num_heads, hidden_size]; the rows once for each head. None = they are copied here.
        """
        num_heads, size = self.arch.num_heads, self.hidden_size
        own = hidden_rows.repeat(1, num_heads) if repeated is None else repeated.view(-1, num_heads * size)
        x = self.kernels.add(own, self.kernels.activate(self.first(hidden_rows), "silu"))
        x = x.view(-1, num_heads, size)
        for blocks in self.later:
            assert isinstance(blocks, nn.ModuleList)
            rows = [x[:, head].contiguous() for head in range(num_heads)]
            x = torch.stack(
                [
                    self.kernels.add(row, self.kernels.activate(block(row), "silu"))
                    for row, block in zip(rows, blocks, strict=True)
                ],
                1,
            )
        return x

    def logits(self, states: torch.Tensor, compute_logits: ComputeLogits) -> torch.Tensor:
        """Logits of the first heads, one product for all of them where they have the target's projection.

        Args:
            states: [n, num_heads or fewer, hidden_size] of `states`.
            compute_logits: the target's.

        Returns:
            [n * heads, vocab_size] float32; of one row's heads, then of the next row's.
        """
        if self.arch.shares_projection:
            return compute_logits(states.reshape(-1, self.hidden_size))
        found = []
        for head in range(states.shape[1]):
            projection = self.projections[head]
            assert isinstance(projection, TokenTable)
            found.append(projection.logits(states[:, head].contiguous()))
        return torch.stack(found, 1).flatten(0, 1)

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes."""
        return dict(self._targets())

    def _targets(self) -> Iterator[tuple[str, WeightTarget]]:
        size = self.hidden_size
        for head in range(self.arch.num_heads):
            name = f"{PREFIXES[0]}{head}"
            yield from linear_targets(self.first, f"{name}.0.linear", first_row=head * size, num_rows=size)
            for i, blocks in enumerate(self.later, start=1):
                assert isinstance(blocks, nn.ModuleList)
                block = blocks[head]
                assert isinstance(block, Linear)
                yield from block.targets(f"{name}.{i}.linear")
            if not self.arch.shares_projection:
                projection = self.projections[head]
                assert isinstance(projection, TokenTable)
                yield from projection.targets(f"{name}.{self.arch.num_blocks}")

    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of names that checkpoints may have and the heads do not need."""
        return (rf"^(medusa_head\.)?\d+\.{self.arch.num_blocks}\.weight$",) if self.arch.shares_projection else ()
