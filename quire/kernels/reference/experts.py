"""Reference: mixtures of experts, token by token and expert by expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import torch

from quire.kernels.routing import Routing

# Added to the sum of normalized weights.
LEAST_SUM = 1e-20


def route(
    logits: torch.Tensor,
    num_chosen: int,
    correction: torch.Tensor | None = None,
    *,
    scoring: str = "softmax",
    is_normalized: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    group_score: str = "max",
    jitter: float = 0.0,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of every token; of equal scores the lower expert comes first.

    Args:
        logits: [num_tokens, num_experts].
        num_chosen: experts of a token.
        correction: [num_experts], added to the scores for the choice alone.
        scoring: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen".
        is_normalized: weights are divided by their sum.
        scale: factor on the weights.
        num_groups, num_chosen_groups: experts outside the best groups are not chosen.
        group_score: "max", or "top2": the sum of a group's two best experts.
        jitter: greater than 0: the sparse mixer in place of `scoring`.
        expert_scales: [num_experts]: factor on the weights of each expert, at last.

    Source: Shazeer et al. 2017 (sparsely gated mixtures), section 2.1; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """
    wide = logits.float()
    if jitter > 0:
        ids, weights = _mix(wide, num_chosen, jitter)
    else:
        scores = {"softmax": wide.softmax(dim=-1), "sigmoid": wide.sigmoid()}.get(scoring, wide)
        choice = wide
        if correction is not None or num_groups > 1:
            choice = scores if correction is None else scores + correction.float()
        if num_groups > 1:
            choice = _without_other_groups(choice, num_groups, num_chosen_groups, group_score)
        ids = _largest(choice, num_chosen)
        weights = scores.gather(1, ids)
        if scoring == "softmax_of_chosen":
            weights = weights.softmax(dim=-1)
    if is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    weights = weights * scale
    if expert_scales is not None:
        weights = weights * expert_scales.float()[ids]
    return sort_by_expert(ids, weights, logits.shape[1])


def arrange(routing: Routing, slots: torch.Tensor) -> Routing:
    """The routing with rows sorted by `slots` [num_experts], other numbers of the experts."""
    found = sort_by_expert(slots.long()[routing.expert_ids.long()], routing.weights, len(slots))
    return dataclasses.replace(found, expert_ids=routing.expert_ids)


def sort_by_expert(expert_ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
    """The routing of a choice: rows in the order of experts, then of tokens."""
    num_chosen, flat = expert_ids.shape[1], expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=num_experts)
    return Routing(
        expert_ids=expert_ids.int(),
        weights=weights.float(),
        starts=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        rows=(order // num_chosen).int(),
        places=places.view(expert_ids.shape).int(),
    )


def grouped_linear(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    linear_of: Callable[[int, torch.Tensor], torch.Tensor],
    output_size: int,
) -> torch.Tensor:
    """Every expert's function of its rows.

    Args:
        x: [any, input_size].
        rows: [num_rows]: the row of `x` that each row is; None = `x` is the rows.
        starts: [num_experts + 1].
        linear_of: (expert, its rows) -> their results.

    Returns:
        [num_rows, output_size].
    """
    given = x if rows is None else x[rows.long()]
    out = x.new_empty(len(given), output_size)
    bounds = starts.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            out[start:end] = linear_of(expert, given[start:end])
    return out


def combine(
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's rows times their weights, in the order of its choices, then of the shared output.

    Args:
        rows: [num_tokens * num_chosen, size].
        places: [num_tokens, num_chosen].
        weights: [num_tokens, num_chosen]; None = ones.
        shared: [num_tokens, size].
        shared_gate: [num_tokens, 1]: `shared` is multiplied by its sigmoid.
    """
    total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.float32)
    for choice in range(places.shape[1]):
        values = rows[places[:, choice].long()].float()
        total = total + (values if weights is None else values * weights[:, choice, None])
    if shared is not None:
        total = total + (shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid())
    return total.to(rows.dtype)


def spread(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The rows of all experts, each its token's vector times the weight."""
    out = x.new_empty(places.numel(), x.shape[1])
    for choice in range(places.shape[1]):
        out[places[:, choice].long()] = (x.float() * weights[:, choice, None]).to(x.dtype)
    return out


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers of the `count` largest of each line, the lowest of equals first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _without_other_groups(
    choice: torch.Tensor, num_groups: int, num_chosen_groups: int, group_score: str
) -> torch.Tensor:
    """Scores with -inf in the place of those outside the best groups."""
    groups = choice.view(len(choice), num_groups, -1)
    best = groups.topk(min(2 if group_score == "top2" else 1, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    is_chosen = torch.zeros_like(best, dtype=torch.bool)
    is_chosen.scatter_(1, _largest(best, num_chosen_groups), True)
    return groups.masked_fill(~is_chosen[:, :, None], -torch.inf).view_as(choice)


def _mix(logits: torch.Tensor, num_chosen: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts one after the other, each weighed among the logits near it.

    Source: Liu et al. 2024 (GRIN: GRadient-INformed MoE), section 2, without its noise.
    """
    left, ids, weights = logits.clone(), [], []
    for _ in range(num_chosen):
        best = _largest(left, 1)
        most = left.gather(1, best)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * jitter
        near = left.masked_fill(is_far, -torch.inf).softmax(dim=-1)
        ids.append(best)
        weights.append(near.gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)
