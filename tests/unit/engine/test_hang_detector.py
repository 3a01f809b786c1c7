"""A core that hangs is found; one that works is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.hang_detector import BUSY_FACTOR, LONGEST_SLACK, START_FACTOR, STEP_SLACK, HangDetector, Sample


def looks(detector: HangDetector, count: int, elapsed_s: float = 1.0, **fields: Any) -> tuple[str | None, float]:
    """The first complaint and the seconds until it, over `count` looks; `cpu_s` grows by `work` each time."""
    work, cpu_s = fields.pop("work", 0.0), fields.pop("cpu_s", 5.0)
    for number in range(count):
        sample = Sample(
            **{"progress": (1,), "should_advance": True, "cpu_s": None if work is None else cpu_s, **fields}
        )
        found = detector.observe(sample, elapsed_s)
        if found:
            return found, number * elapsed_s
        cpu_s += work or 0.0
    return None, 0.0


def test_a_core_that_neither_advances_nor_works_is_stuck_after_the_timeout():
    found, seconds = looks(HangDetector(10), 100)
    assert found is not None and "no CPU use" in found
    assert seconds == 10


def test_an_idle_core_is_not_stuck():
    detector = HangDetector(10)
    assert looks(detector, 100, should_advance=False) == (None, 0.0)
    assert detector.stalled_s == 0


def test_a_core_that_advances_is_not_stuck():
    detector = HangDetector(10)
    assert not any(detector.observe(Sample(progress=(n,), should_advance=True, cpu_s=1.0), 5.0) for n in range(100))


def test_a_long_step_that_works_is_waited_for():
    assert looks(HangDetector(10), int(BUSY_FACTOR * 10) - 1, work=0.5)[0] is None
    found, seconds = looks(HangDetector(10), 1000, work=0.5)
    assert found is not None and "no step finished" in found
    assert seconds == BUSY_FACTOR * 10


def test_a_step_with_much_to_do_is_waited_for_longer():
    found, seconds = looks(HangDetector(10), 10_000, work=1.0, step_s=30.0)
    assert found is not None
    assert seconds == STEP_SLACK * 30.0


def test_a_core_that_spins_in_a_small_step_is_stuck_after_the_timeout():
    found, seconds = looks(HangDetector(10), 1000, work=1.0, step_s=0.005, longest_step_s=0.4)
    assert found is not None and "used 10.0 s of CPU time, expected 0.005 s" in found
    assert seconds == 10


def test_threads_that_all_work_do_not_shorten_the_timeout():
    assert looks(HangDetector(10), 1000, work=8.0, step_s=0.005)[1] == 10


def test_a_small_step_may_take_what_a_few_of_the_longest_took():
    found, seconds = looks(HangDetector(10), 1000, work=1.0, step_s=0.005, longest_step_s=12.0)
    assert found is not None
    assert seconds == LONGEST_SLACK * 12.0


def test_with_a_short_timeout_the_first_use_of_something_is_no_hang():
    found, seconds = looks(HangDetector(0.5), 10_000, elapsed_s=0.05, work=0.05, step_s=0.0005)
    assert found is not None and "no step finished" in found
    assert seconds == pytest.approx(BUSY_FACTOR * 0.5, abs=0.1)


def test_a_core_that_gets_little_of_the_cpu_has_more_time():
    found, seconds = looks(HangDetector(10), 1000, work=0.25, step_s=0.005)
    assert found is not None
    assert seconds == 40


def test_a_core_that_waits_for_a_disk_or_a_cpu_is_at_work():
    assert looks(HangDetector(10), int(BUSY_FACTOR * 10) - 1, is_waiting=True) == (None, 0.0)


def test_a_core_that_was_stopped_is_stuck_also_where_cpu_time_says_nothing():
    found, seconds = looks(HangDetector(10), 1000, work=None, is_stopped=True)
    assert found is not None and "no CPU use" in found
    assert seconds == 10


def test_a_core_is_suspected_after_half_the_timeout():
    detector = HangDetector(10)
    assert looks(detector, 5) == (None, 0.0) and not detector.is_suspicious
    assert looks(detector, 1, cpu_s=5.0) == (None, 0.0) and detector.is_suspicious


def test_where_cpu_time_says_nothing_steps_decide():
    found, seconds = looks(HangDetector(10), 1000, work=None)
    assert found is not None
    assert seconds == BUSY_FACTOR * 10


def test_a_starting_core_has_more_time():
    found, seconds = looks(HangDetector(10), 1000, is_starting=True)
    assert found is not None
    assert seconds == START_FACTOR * 10
    assert looks(HangDetector(10), 10_000, is_starting=True, work=0.1)[0] is None


def test_time_in_which_nobody_watched_does_not_count():
    found, _ = looks(HangDetector(10), 8, elapsed_s=3600.0)
    assert found is None
