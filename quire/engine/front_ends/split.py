"""One step of an engine core as the parts that are of single front ends. Pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs
from quire.engine.front_ends.messages import HANDLE_BITS, serial_of


def split_step(step: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Serial number of each front end that has a part in a step -> that part; what is of no request is in each."""
    of_tokens = step.handles >> HANDLE_BITS
    serials = set(of_tokens.tolist())
    serials.update(serial_of(one.handle) for one in step.finished)
    serials.update(serial_of(one.handle) for one in step.events)
    serials.update(serial_of(handle) for handle, _ in step.prompt_logprobs)
    if len(serials) == 1:
        return {serials.pop(): step}
    return {serial: _part(step, serial, of_tokens == serial) for serial in serials}


def _part(step: EngineCoreOutputs, serial: int, is_own: np.ndarray) -> EngineCoreOutputs:
    logprobs = None if step.logprobs is None else step.logprobs.select(is_own)
    return replace(
        step,
        handles=step.handles[is_own],
        new_token_ids=step.new_token_ids[is_own],
        logprobs=None if logprobs is None or not len(logprobs.index) else logprobs,
        prompt_logprobs=tuple(one for one in step.prompt_logprobs if serial_of(one[0]) == serial),
        finished=tuple(one for one in step.finished if serial_of(one.handle) == serial),
        events=tuple(one for one in step.events if serial_of(one.handle) == serial),
        drafts=None if step.drafts is None else _own_drafts(step.drafts, serial),
    )


def _own_drafts(drafts: DraftOutcomes, serial: int) -> DraftOutcomes | None:
    is_own = drafts.handles >> HANDLE_BITS == serial
    if not is_own.any():
        return None
    return DraftOutcomes(drafts.handles[is_own], drafts.num_drafted[is_own], drafts.num_accepted[is_own])
