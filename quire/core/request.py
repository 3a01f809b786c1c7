"""A request as the control plane holds it. Owned by the scheduler, from arrival to the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from quire.core.engine_messages import EngineCoreRequest, FinishReason

ExtraKeys = tuple[tuple[str, str], ...]
"""What besides its tokens decides a block's content, as (kind, value): ("cache_salt", s), later ("lora", name), ..."""


class RequestStatus(IntEnum):
    """Where a request stands. Any value above PREEMPTED is an end."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        """True once the request has ended, however it ended."""
        return self > RequestStatus.PREEMPTED


STATUS_AT_END = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.REPETITION: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.QUEUE_TIMEOUT: RequestStatus.FINISHED_ERROR,
}


@dataclass(slots=True, eq=False)
class Request:
    """One request off the hot path; while it is running, its lengths live in its `RequestTable` row.

    Attributes:
        message: what the front-end sent; never changes.
        token_ids: [num_tokens] int32; prompt and output so far. Current only while the request has no row.
        rank: its place in the order in which requests are served (`scheduler.policy`), unique.
        tenant_slot: whose it is, where tenants share (`scheduler.fair_order`).
        stop_token_ids: ids that end it, EOS apart.
        extra_keys: block number -> what besides tokens decides its content; only blocks that have such keys. Set by the
            KV cache manager, as block numbers are its own.
        status: where it stands.
        row: its row, -1 when it has none.
        num_preemptions: how often it lost its row.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; -1 before it.
        num_computed_tokens: tokens that were computed when it lost its row last.
        num_found_tokens, num_common_tokens: of models with recurrent layers, when it got its row last: first tokens
            whose state was found in the prefix cache, and those whose blocks of attention were.
        num_prompt_logprobs_sent: prompt positions whose log-probabilities went out; a recomputed prompt repeats none.
        block_tokens: tokens of each full block of `token_ids`, in order, as the prefix tree has them; empty until
            they are looked for.
        block_hashes: names of its first full blocks, as far as they were asked for (`KVCacheManager.name_blocks`).
    """

    message: EngineCoreRequest
    token_ids: np.ndarray
    rank: int = 0
    tenant_slot: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    extra_keys: dict[int, ExtraKeys] = field(default_factory=dict)
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    num_preemptions: int = 0
    num_cached_tokens: int = -1
    num_computed_tokens: int = 0
    num_found_tokens: int = 0
    num_common_tokens: int = 0
    num_prompt_logprobs_sent: int = 0
    block_tokens: list[bytes] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    @classmethod
    def from_message(cls, message: EngineCoreRequest, rank: int = 0) -> Request:
        """The request as it arrives."""
        token_ids = message.prompt_token_ids
        if message.output_token_ids is not None:
            token_ids = np.concatenate((token_ids, message.output_token_ids))
        return cls(
            message=message,
            token_ids=np.ascontiguousarray(token_ids, dtype=np.int32),
            rank=rank,
            stop_token_ids=frozenset(message.sampling_params.stop_token_ids or ()),
        )

    @property
    def handle(self) -> int:
        """The front-end's name of the request."""
        return self.message.handle

    @property
    def request_id(self) -> str:
        """The user's name of the request."""
        return self.message.request_id

    @property
    def unique_id(self) -> str:
        """A name for other programs: that of the user, and what no other request of this engine has."""
        return f"{self.message.request_id}-{self.message.handle}"

    @property
    def has_started(self) -> bool:
        """True once it has run, be it on another engine core."""
        return self.num_cached_tokens >= 0 or self.message.output_token_ids is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.message.prompt_token_ids)

    @property
    def may_read_prefix_cache(self) -> bool:
        """False when the user asked for it, or when every prompt position must be computed for its logprobs."""
        params = self.message.sampling_params
        return not params.skip_reading_prefix_cache and params.prompt_logprobs is None
