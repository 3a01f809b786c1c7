"""n answers to one prompt: `n` requests in the engine core, one for the user.

Called by the front-end. Stateless: that the prompt is computed once is the scheduler's concern (`scheduler.forks`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from quire.core.engine_messages import EngineCoreRequest
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.engine.input_processor import PreparedRequest
from quire.engine.seeds import request_key


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of answer `index`: one answer, from a seed of its own when the request has one."""
    child = copy.copy(params)
    child.n = 1
    if params.seed is not None:
        child.seed = _wrapped_int64(params.seed + index)
    if index > 0:
        child.prompt_logprobs = None  # the first answer has them
        child.return_progress = False
        child.skip_reading_prefix_cache = params.skip_reading_prefix_cache and params.prompt_logprobs is None
    return child


def _wrapped_int64(value: int) -> int:
    """`value` modulo 2**64, in the range that a seed may have."""
    return (value + 2**63) % 2**64 - 2**63


def make_children(
    prepared: PreparedRequest,
    request_id: str,
    handles: Iterable[int],
    engine_seed: int,
    options: RequestOptions = DEFAULT_OPTIONS,
    arrival_time: float = 0.0,
) -> list[EngineCoreRequest]:
    """One message for each answer; `handles` gives their names, in the order of their indexes.

    The first answer's wait is the request's: the others have no deadline of their own.
    """
    messages: list[EngineCoreRequest] = []
    for index, handle in enumerate(handles):
        first = messages[0].handle if messages else handle
        params = child_params(prepared.params, index)
        messages.append(
            EngineCoreRequest(
                handle=handle,
                request_id=request_id if prepared.params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=prepared.prompt_token_ids,
                sampling_params=params,
                seed=request_key(params.seed, engine_seed, handle),
                eos_token_id=prepared.eos_token_id,
                arrival_time=arrival_time,
                priority=options.priority,
                tenant=options.tenant.name,
                tenant_weight=options.tenant.weight,
                tenant_policy=options.tenant.policy,
                queue_timeout_s=0.0 if index else options.queue_timeout or 0.0,
                cache_salt=prepared.cache_salt,
                num_shared_tokens=prepared.num_shared_tokens,
                template_id=prepared.template_id,
                fork_group=None if prepared.params.n == 1 else first,
            )
        )
    return messages
