"""What the draft controller decided, and why: plain records, made by the controller, read by metrics and receipts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """What a step was, as far as drafts are concerned."""

    DRAFTED = "drafted"
    PROBE = "probe"
    CLOSED = "closed"
    CONTROL = "control"
    NO_GAIN = "no_gain"
    NO_PROPOSALS = "no_proposals"


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One class of load.

    Attributes:
        name: what steps are of it.
        ratio: tokens per second with speculation over those without, as measured lately; 1.0 = not measured yet.
        is_closed: nothing is drafted at present, because that was slower.
        num_closings: since it was last seen to gain.
    """

    name: str
    ratio: float
    is_closed: bool
    num_closings: int


@dataclass(frozen=True, slots=True)
class ControllerStats:
    """Since the engine started.

    Attributes:
        reasons: steps by what they were.
        prediction_ratio: measured over predicted seconds of steps, of late.
        debt_s: seconds that trials lost and that steps have not paid for yet.
        num_closings: of all classes of load.
        buckets: those that were met.
    """

    reasons: dict[Reason, int]
    prediction_ratio: float
    debt_s: float
    num_closings: int
    buckets: tuple[BucketStats, ...]
