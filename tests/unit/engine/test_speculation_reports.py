"""What is told of decisions about drafts: now and then, and before there is nothing to do."""

from __future__ import annotations

import dataclasses

from quire.core.speculation_stats import SpeculationStats
from quire.engine.speculation_reports import INTERVAL_S, SpeculationReports
from tests.unit.engine.test_stat_logger import step


def test_figures_come_at_most_once_in_an_interval_but_with_the_last_outputs():
    reports = SpeculationReports(lambda: SpeculationStats(store_bytes=7))
    told = []
    for timestamp, is_last in ((10.0, False), (10.5, False), (10.6, True), (10.7, False), (10.6 + INTERVAL_S, False)):
        outputs = dataclasses.replace(step(1), timestamp=timestamp)
        found = reports.add(outputs, is_last=is_last)
        told.append(found.speculation is not None)
        assert dataclasses.replace(found, speculation=None) is not outputs or not told[-1]
    assert told == [True, False, True, False, True]
