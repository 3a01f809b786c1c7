"""What the draft controller decided, and why: plain records.

Made by the controller; read by metrics, the log and /server_info.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        num_proposed: draft tokens that there were to choose from.
        proposing_s: seconds that proposers took, in planning and on the worker.
        buckets: those that were met.
    """

    reasons: dict[Reason, int] = field(default_factory=dict)
    prediction_ratio: float = 1.0
    debt_s: float = 0.0
    num_closings: int = 0
    num_proposed: int = 0
    proposing_s: float = 0.0
    buckets: tuple[BucketStats, ...] = ()

    @property
    def num_steps(self) -> int:
        """Those that something was decided about."""
        return sum(self.reasons.values())

    def since(self, earlier: ControllerStats | None) -> ControllerStats:
        """What was counted after `earlier`; all of it, if the engine core was restarted in between."""
        if earlier is None or self.num_steps < earlier.num_steps or self.proposing_s < earlier.proposing_s:
            return self
        return replace(
            self,
            reasons={reason: count - earlier.reasons.get(reason, 0) for reason, count in self.reasons.items()},
            num_closings=self.num_closings - earlier.num_closings,
            num_proposed=self.num_proposed - earlier.num_proposed,
            proposing_s=self.proposing_s - earlier.proposing_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Of one engine core.

    Attributes:
        controller: what it decided; None = all drafts are verified.
        history_bytes: memory of the indices of unfinished requests' texts.
        store_bytes, num_stored: memory of past answers that drafts come from, with their indices, and their number.
    """

    controller: ControllerStats | None = None
    history_bytes: int = 0
    store_bytes: int = 0
    num_stored: int = 0
