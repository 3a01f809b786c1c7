"""What the schedule keeps of a model, and of a request that wants it. Values of `schedule`; no rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.server.switching.life_cycle import HELD, NEXT, ModelState


def _ignore() -> None:
    """Nothing waits for it."""


class Ticket:
    """A request's claim on a model: waits, is granted, or fails.

    Attributes:
        model: name.
        arrived_s: when it came.
        stay: the load it was granted for; None = not granted.
        error: why it cannot be granted; None = it can.
        on_change: called when it is granted or fails.
    """

    __slots__ = ("arrived_s", "error", "model", "on_change", "stay")

    def __init__(self, model: str, arrived_s: float) -> None:
        self.model = model
        self.arrived_s = arrived_s
        self.stay: int | None = None
        self.error: Exception | None = None
        self.on_change: Callable[[], None] = _ignore


@dataclass(slots=True, eq=False)
class Slot:
    """A model.

    Attributes:
        name: by which it is known here.
        num_bytes: memory it takes while loaded; None = not known yet.
        file_bytes: of its weights on disk.
        is_pinned: never unloaded for another.
        stay: number of its load.
        users: granted and not ended.
        waiting: oldest first.
        is_dismissed: an operator has it unloaded, whether others wait for its memory or not.
        ready_s, used_s: when it became ready, and when its last request ended.
        loading_s: when its load began.
        failure: why it failed; None = it did not.
        num_failures: in a row.
        retry_s: until then requests are refused.
    """

    name: str
    num_bytes: int | None = None
    file_bytes: int = 0
    is_pinned: bool = False
    state: ModelState = ModelState.UNLOADED
    stay: int = 0
    users: int = 0
    waiting: dict[Ticket, None] = field(default_factory=dict)
    is_dismissed: bool = False
    is_measured: bool = False
    ready_s: float = 0.0
    used_s: float = 0.0
    loading_s: float = 0.0
    failure: Exception | None = None
    num_failures: int = 0
    retry_s: float = 0.0

    def enter(self, state: ModelState) -> None:
        """Change the state."""
        assert state in NEXT[self.state], f"{self.name}: {state.value} does not follow {self.state.value}"
        self.state = state

    @property
    def held_bytes(self) -> int:
        """Memory that is taken now."""
        return (self.num_bytes or 0) if self.state in HELD else 0

    @property
    def waits_since_s(self) -> float:
        """When the oldest request that waits came."""
        return next(iter(self.waiting)).arrived_s
