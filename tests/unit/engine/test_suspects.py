"""Who brings its company down is found by halves, and nobody else is accused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.fault_bisector import FaultBisector


def find(count: int, faulty: int) -> int:
    """Tries until the culprit is alone; everybody else must have been cleared or still be able to run."""
    suspects = FaultBisector()
    assert suspects.report_failure(range(count)) == (0 if count == 1 else None)
    num_tries = 0
    while True:
        group = [handle for handle in range(count) if suspects.may_run(handle)]
        num_tries += 1
        assert group and num_tries <= 2 * count
        if faulty in group:
            if suspects.report_failure(group) is not None:
                suspects.clear(faulty)
                break
        else:
            for handle in group:
                suspects.clear(handle)
    for handle in range(count):
        suspects.clear(handle)
    assert not suspects
    return num_tries


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1))))
def test_the_culprit_is_found(case: tuple[int, int]):
    count, faulty = case
    assert find(count, faulty) <= 2 * count.bit_length() + 1


def test_everybody_may_run_while_nobody_is_accused():
    suspects = FaultBisector()
    assert suspects.may_run(7)
    assert not suspects


def test_others_wait_until_the_suspects_have_proved_themselves():
    suspects = FaultBisector()
    suspects.report_failure([1, 2])
    assert [suspects.may_run(handle) for handle in (1, 2, 3)] == [True, False, False]
    assert suspects.clear(1)
    assert [suspects.may_run(handle) for handle in (1, 2, 3)] == [False, True, False]
    assert suspects.clear(2)
    assert suspects.may_run(3)


@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_a_suspect_that_ended_is_not_waited_for(gone: int):
    suspects = FaultBisector()
    suspects.report_failure([1, 2, 3, 4])
    suspects.clear(gone)
    for handle in (1, 2, 3, 4):
        suspects.clear(handle)
    assert not suspects
