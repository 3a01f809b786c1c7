"""SpeculationReports: tells the front end now and then what was decided about drafts.

Called by the engine core with every step's outputs. Owns the time of the last report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.speculation_stats import SpeculationStats

INTERVAL_S = 1.0


class SpeculationReports:
    """Adds the figures to outputs, at most once in INTERVAL_S, and to the last ones before there is nothing to do.

    Args:
        read: the figures as of now.
    """

    def __init__(self, read: Callable[[], SpeculationStats]) -> None:
        self._read = read
        self._last_s = -INTERVAL_S

    def add(self, outputs: EngineCoreOutputs, *, is_last: bool) -> EngineCoreOutputs:
        """The outputs, with the figures if they are due."""
        if not is_last and outputs.timestamp - self._last_s < INTERVAL_S:
            return outputs
        self._last_s = outputs.timestamp
        return dataclasses.replace(outputs, speculation=self._read())
