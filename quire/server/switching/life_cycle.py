"""The life of a model in a server of several: its states, and which follows which. No state of its own.

unloaded -> queued -> loading -> ready -> draining -> unloading -> unloaded
                                    '--- (idle) ---------^
queued, loading, unloading -> failed -> queued (a request after the pause)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class ModelState(str, Enum):
    """Where a model is."""

    UNLOADED = "unloaded"
    """Not in memory, and nothing waits for it."""
    QUEUED = "queued"
    """Requests wait for it; others load, or hold the memory."""
    LOADING = "loading"
    """Its engine core starts."""
    READY = "ready"
    """Requests run."""
    DRAINING = "draining"
    """Running requests end; new ones wait for the next load."""
    UNLOADING = "unloading"
    """Its engine core ends."""
    FAILED = "failed"
    """The last load failed, or its core did for good; requests are refused until the pause is over."""


HELD = frozenset((ModelState.LOADING, ModelState.READY, ModelState.DRAINING, ModelState.UNLOADING))
"""States in which a model's memory is taken."""

NEXT: Mapping[ModelState, frozenset[ModelState]] = {
    ModelState.UNLOADED: frozenset((ModelState.QUEUED,)),
    ModelState.QUEUED: frozenset((ModelState.LOADING, ModelState.UNLOADED, ModelState.FAILED)),
    ModelState.LOADING: frozenset((ModelState.READY, ModelState.FAILED)),
    ModelState.READY: frozenset((ModelState.DRAINING, ModelState.UNLOADING)),
    ModelState.DRAINING: frozenset((ModelState.READY, ModelState.UNLOADING)),
    ModelState.UNLOADING: frozenset((ModelState.UNLOADED, ModelState.QUEUED, ModelState.FAILED)),
    ModelState.FAILED: frozenset((ModelState.QUEUED, ModelState.UNLOADED)),
}
