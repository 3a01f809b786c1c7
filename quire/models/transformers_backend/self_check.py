"""What no configuration says of a class: whether tokens meet in attention alone, and where positions come from.

Called by `model` before its first step. A step holds tokens of many requests in one row: a class that counts them,
looks at neighbours or takes the longest of the batch would compute wrong tokens without an error. No state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.models.transformers_backend.attention import PagedLayer

TOLERANCE = 0.02
"""Largest relative difference that rounding explains, in bfloat16."""
IDS, POSITIONS = (3, 1, 2), (5, 9, 2)
OTHER_IDS, OTHER_POSITIONS = (1, 4), (9, 11)
"""The second token of the first step is the first of the other."""


class OwnTokenLayer(PagedLayer):
    """In the place of attention: a token's result depends on its own query, key and value alone."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """As `PagedLayer.forward`."""
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
        mixed = values + (0.5 * query + 0.25 * keys).sum(-1, keepdim=True)
        return mixed.transpose(1, 2).contiguous()


def compare_batches(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[bool, bool]:
    """Whether a token's result is the same beside others: up to rounding, and bit for bit.

    Args:
        forward: ids and positions [num_tokens] -> hidden states, with every layer an `OwnTokenLayer`.
    """
    first = forward(torch.tensor(IDS), torch.tensor(POSITIONS))[1].float()
    other = forward(torch.tensor(OTHER_IDS), torch.tensor(OTHER_POSITIONS))[0].float()
    largest = float(first.abs().max())
    is_close = float((first - other).abs().max()) <= TOLERANCE * largest
    return is_close, torch.equal(first, other)
