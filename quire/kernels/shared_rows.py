"""ExpertRows, SharedRows: what ranks that share experts give to an exchange, and what they get. Values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Vectors for experts, and which experts.

    Attributes:
        x: [num_tokens, size], or with `x_rows` [num_tokens * num_chosen, size]; rows may be strided.
        expert_ids: [num_tokens, num_chosen] int32.
        x_rows: [num_tokens, num_chosen] int32: row of `x` of each choice; None = that of its token.
    """

    x: torch.Tensor
    expert_ids: torch.Tensor
    x_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Vectors of all replicas for the experts of this rank.

    Attributes:
        rows: [room, size], by slot; what lies behind the last means nothing.
        starts: [slots of this rank + 1] int32: first row of each.
        extent: [3] int32: first and end of these rows among those of all ranks, and how many there are.
        places: [num_tokens, num_chosen] int32: where each choice of this replica is among those of all ranks.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    extent: torch.Tensor
    places: torch.Tensor
