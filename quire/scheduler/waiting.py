"""Why a request was not admitted in a step. Values; made by admission, kept in the step's plan for replays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """What a waiting request lacks."""

    ROWS = "all rows are taken (max_num_seqs)"
    PAGES = "pages are short"
    TOKENS = "the step's tokens are spent (max_num_batched_tokens)"
    PACE = "prompts are held back so that decoding requests keep their pace (max_decode_slowdown)"
    SWAPPED = "swapped requests come back first, once there are pages for them to grow in"
    SIBLING = "another request is computing the prompt that they share"
    GATE = "a gate holds it back"
    PREEMPTION = "requests were preempted in this step"
    OTHER = "its policy lets another go first"


@dataclass(frozen=True, slots=True)
class Blocked:
    """The refusal of admission.

    Attributes:
        handle: the request that lacks something: the one that was refused, or one that goes before it.
        num_missing: pages, where pages are short.
        is_passed_over: those behind it in the queue may enter in the same step.
    """

    handle: int
    reason: WaitReason
    num_missing: int = 0
    is_passed_over: bool = False
