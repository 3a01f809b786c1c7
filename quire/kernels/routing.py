"""Routing: which experts every token of a step goes to, and where its rows lie. Made by routers; a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of `num_tokens` tokens, each of which has `num_chosen`, in order of their scores.

    "Rows" are those of all experts, sorted by expert, then by token.

    Attributes:
        expert_ids: [num_tokens, num_chosen] int32.
        weights: [num_tokens, num_chosen] float32: of each expert's output in the sum (or of its input).
        starts: [num_experts + 1] int32: first row of each expert.
        rows: [num_tokens * num_chosen] int32: token of each row.
        places: [num_tokens, num_chosen] int32: row of each choice.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
