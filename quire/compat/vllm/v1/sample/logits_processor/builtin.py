"""vLLM's `v1.sample.logits_processor.builtin`: what processors share that keep a value for each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.compat.vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from quire.core.sampling_params import SamplingParams

__all__ = ["process_dict_updates"]

T = TypeVar("T")


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Bring `req_entries` (place -> value) up to date, in place.

    Args:
        batch_update: None = nothing changed.
        new_state: (parameters, prompt, output) -> the value of a request that was added; None = it has none.

    Returns:
        Whether anything changed.
    """
    if batch_update is None:
        return False
    has_changed = False
    for place in batch_update.removed:
        has_changed |= req_entries.pop(place, None) is not None
    for place, params, prompt, output in batch_update.added:
        has_changed |= req_entries.pop(place, None) is not None
        state = new_state(params, prompt, output)
        if state is not None:
            req_entries[place] = state
            has_changed = True
    for source, target, direction in batch_update.moved:
        moving, standing = req_entries.pop(source, None), req_entries.pop(target, None)
        if moving is not None:
            req_entries[target] = moving
        if standing is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = standing
        has_changed |= moving is not None or standing is not None
    return has_changed
