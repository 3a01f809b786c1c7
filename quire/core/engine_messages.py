"""The messages between front-end and engine core.

A request goes in as one `EngineCoreRequest`; one step comes back as one `EngineCoreOutputs` of arrays. The
front-end names a request by an integer `handle` that it never reuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from quire.core.draft_stats import DraftOutcomes
from quire.core.logprobs import LogprobsArrays
from quire.core.sampling_params import SamplingParams
from quire.core.speculation_stats import SpeculationStats
from quire.core.stats import RequestEvent, SchedulerStats
from quire.core.step_perf import StepPerf

MAX_PRIORITY = 1 << 22
"""Largest `priority` of a request, and without its sign the smallest."""
MAX_QUEUE_TIMEOUT_S = 1e9
"""Largest `queue_timeout_s` of a request."""


class FinishReason(IntEnum):
    """Why a request ended; `str()` is the name users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    QUEUE_TIMEOUT = 5

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A validated request.

    Attributes:
        handle: the front-end's integer name, unique for the engine's life.
        request_id: the user's name, for logs.
        prompt_token_ids: [num_prompt_tokens] int32, at least one.
        sampling_params: normalised by the input processor; `max_tokens` is a number, `n` is 1.
        seed: 64-bit key of the request's random numbers.
        eos_token_id: ends the request unless `ignore_eos`; -1 = none.
        arrival_time: seconds, wall clock.
        priority: lower runs first (priority policy only).
        tenant: whose it is (fair policy only).
        tenant_weight: the tenant's share of the engine, relative to those of others; more than 0.
        tenant_policy: order of the tenant's own requests: fcfs, priority, shortest.
        queue_timeout_s: it ends when it has waited so many seconds without ever running; 0 = it waits.
        cache_salt: requests share cached blocks only with requests of the same salt.
        num_shared_tokens: full blocks of so many first tokens of the prompt are shared whatever the salt.
        template_id: names the chat template that made the prompt; 0 = none did.
        output_token_ids: [num_output_tokens] int32; what it has put out already, when it is continued; None = nothing.
            Fewer than `max_tokens`. Counted by limits, penalties and positions as if it had never been interrupted.
        fork_group: handle of the first of several requests with the same prompt and salt: the prompt is computed for
            one of them, and the others share its blocks. None = it has no siblings.
    """

    handle: int
    request_id: str
    prompt_token_ids: np.ndarray
    sampling_params: SamplingParams
    seed: int
    eos_token_id: int = -1
    arrival_time: float = 0.0
    priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0
    tenant_policy: str = "fcfs"
    queue_timeout_s: float = 0.0
    cache_salt: str | None = None
    num_shared_tokens: int = 0
    template_id: int = 0
    output_token_ids: np.ndarray | None = None
    fork_group: int | None = None


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """What a beam search found for one of its requests.

    Attributes:
        token_ids: [num_tokens] int32; new tokens, the one that ended the sequence included.
        cum_logprob: sum of their log-probabilities.
        score: what sequences are ordered by.
    """

    token_ids: np.ndarray
    cum_logprob: float
    score: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended in this step.

    Attributes:
        stop_reason: the stop id that matched; None for EOS and length.
        error: what went wrong.
        error_field: the field of the request that was wrong; None = the error is not the caller's.
        beam: the whole answer of a beam search; tokens sent before were placeholders (a heartbeat).
        kv_transfer_params: of the response, from a KV connector.
    """

    handle: int
    finish_reason: FinishReason
    stop_reason: int | None = None
    error: str | None = None
    error_field: str | None = None
    beam: BeamAnswer | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutputs:
    """One step's outputs.

    Attributes:
        handles: [num_new_tokens] int64; a handle appears once per new token, in order.
        new_token_ids: [num_new_tokens] int32.
        logprobs: `index` refers to entries of `handles`.
        prompt_logprobs: (handle, lines) as positions are computed; `index` is the prompt position.
        finished: requests that ended; their last tokens are in this message.
        events: lifecycle events since the last message.
        stats: the control plane after this step.
        timestamp: seconds, monotonic clock.
        drafts: what its drafts came to; None = it had none.
        speculation: what was decided about drafts so far; None = as it was said last.
        perf: what it computed and moved; None = it was not asked for.
        engine_index: whose step it was, of several engine cores; set by the receiver.
    """

    handles: np.ndarray
    new_token_ids: np.ndarray
    logprobs: LogprobsArrays | None
    prompt_logprobs: tuple[tuple[int, LogprobsArrays], ...]
    finished: tuple[FinishedRequest, ...]
    events: tuple[RequestEvent, ...]
    stats: SchedulerStats
    timestamp: float
    drafts: DraftOutcomes | None = None
    speculation: SpeculationStats | None = None
    perf: StepPerf | None = None
    engine_index: int = 0
