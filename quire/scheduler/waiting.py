"""Why the first waiting request was not admitted in a step. Values; made by the scheduler for replays."""

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
    GATE = "a gate holds it back"
    PREEMPTION = "requests were preempted in this step"
    OTHER = "its policy lets another go first"


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What holds up the first in the queue; `num_missing` pages, where pages are short."""

    handle: int
    reason: WaitReason
    num_missing: int = 0
