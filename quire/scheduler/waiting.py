"""Why a request was not admitted in a step. Values; made by admission, kept in the step's plan for replays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """What a waiting request lacks."""

    ROWS = "max_num_seqs reached"
    PAGES = "not enough free KV blocks"
    TOKENS = "max_num_batched_tokens reached"
    PACE = "prefill throttled to protect decode latency (max_decode_slowdown)"
    SWAPPED = "swapped requests are resumed first, once there are enough free KV blocks"
    SIBLING = "another request is computing the prompt that they share"
    WAITING_FOR_REMOTE_KVS = "its keys and values are being loaded"
    GATE = "waiting for a gate (such as its grammar)"
    PREEMPTION = "requests were preempted in this step"
    OTHER = "the scheduling policy runs another first"


@dataclass(frozen=True, slots=True)
class Blocked:
    """The refusal of admission.

    Attributes:
        handle: the request that lacks something: the one that was refused, or one that goes before it.
        num_missing: missing blocks, where there are too few.
        is_passed_over: those behind it in the queue may enter in the same step.
    """

    handle: int
    reason: WaitReason
    num_missing: int = 0
    is_passed_over: bool = False
