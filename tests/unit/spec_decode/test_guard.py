"""The guard: plain steps for comparison, closing what is slower, and trials that are paid for."""

from __future__ import annotations

import pytest

from quire.spec_decode.guard import CONTROL_INTERVAL, CONTROL_RUN, MOST_CLOSED_S, Arm, DraftGuard, Promise
from quire.spec_decode.load import LoadBucket, bucket_of

ONE = bucket_of(1, 0, 100)


def run(guard: DraftGuard, num_steps: int, speed: float, bucket: LoadBucket = ONE, step_s: float = 0.01) -> list[Arm]:
    """Steps of which those with drafts are `speed` times as fast as plain ones."""
    arms = []
    for _ in range(num_steps):
        arm = guard.next_arm(bucket, promise=Promise.NONE, may_try=True)
        is_open = arm is Arm.OPEN
        guard.record(bucket, is_open, step_s, step_s / speed if is_open else step_s, is_probe=False)
        arms.append(arm)
    return arms


def test_a_gaining_class_stays_open_with_one_plain_step_in_64():
    guard = DraftGuard()
    run(guard, 200, 2.0)
    arms = run(guard, 4 * CONTROL_RUN * CONTROL_INTERVAL, 2.0)
    num_control = 4 * CONTROL_RUN
    assert arms.count(Arm.CONTROL) == num_control and arms.count(Arm.OPEN) == num_control * (CONTROL_INTERVAL - 1)
    assert not guard.num_closings


def test_where_drafts_gain_little_more_steps_are_plain():
    guard, few = DraftGuard(), DraftGuard()
    run(guard, 200, 1.25)
    arms = run(guard, 1200, 1.25)
    assert 1200 / 18 < arms.count(Arm.CONTROL) < 1200 / 14, "one of 16, a quarter of 64"
    run(few, 200, 1.02)
    arms = run(few, 1200, 1.02)
    assert 1200 / 7 < arms.count(Arm.CONTROL) < 1200 / 5, "one of 6"


def test_plain_steps_of_a_closed_class_are_what_drafts_are_compared_with():
    guard = DraftGuard()
    run(guard, 20, 2.0)
    guard.record_skipped(ONE, 100, 0.01, 0.005)
    assert guard.buckets[ONE].plain.speed > 1.95


def test_on_a_machine_that_has_become_faster_drafts_do_not_seem_to_gain():
    guard = DraftGuard()
    run(guard, 20, 1.0)
    assert guard.plain_share(ONE, 0.01, 0.008, num_drafts=4) == pytest.approx(0.8)
    assert guard.plain_share(ONE, 0.01, 0.012, num_drafts=4) == 1.0
    assert guard.plain_share(ONE, 0.01, 0.012, num_drafts=0) == pytest.approx(1.2), "it was a plain step"


def test_one_slow_moment_does_not_close_what_has_gained_ten_times_as_much():
    guard = DraftGuard()
    run(guard, 1000, 2.0, step_s=0.001)
    assert guard.buckets[ONE].lost_s < -0.3
    for step_s in (0.03, 0.03, 0.03, 0.03, 0.03, 0.03):
        guard.record(ONE, True, 0.001, step_s, is_probe=False)  # of each three times what is usual counts
    assert not guard.num_closings
    run(guard, 1000, 0.5, step_s=0.001)
    assert guard.num_closings


def test_a_step_that_was_not_asked_about_is_a_plain_one():
    guard = DraftGuard()
    guard.record(ONE, False, 0.01, 0.01, is_probe=False)
    assert guard.buckets[ONE].plain.num_steps == 1 and guard.busy_s == 0.01


def test_a_losing_class_is_closed_for_longer_and_longer():
    guard = DraftGuard()
    arms = run(guard, 5000, 0.5)
    openings = [at for at in range(1, len(arms)) if arms[at] is Arm.OPEN and arms[at - 1] is Arm.CLOSED]
    pauses = [later - earlier for earlier, later in zip(openings, openings[1:], strict=False)]
    assert pauses[0] >= 100 and pauses[-1] >= 1.9 * pauses[0]
    assert arms.count(Arm.OPEN) < 50


def test_no_closing_is_longer_than_the_bound_once_the_debt_is_paid():
    guard = DraftGuard()
    run(guard, 60_000, 0.9, step_s=0.004)
    bucket = guard.buckets[ONE]
    assert bucket.num_closings > 5
    assert bucket.closed_until_s <= guard.busy_s + MOST_CLOSED_S


def test_while_a_loss_is_not_paid_no_other_class_is_tried():
    guard = DraftGuard()
    while not guard.num_closings:
        run(guard, 1, 0.1)
    assert guard.debt_s > 0.05
    assert set(run(guard, 100, 0.1, bucket_of(64, 0, 5000))) == {Arm.CLOSED}


def test_a_class_that_becomes_good_is_found_open_again():
    guard = DraftGuard()
    run(guard, 300, 0.9)
    assert guard.num_closings
    run(guard, 3000, 2.0)
    assert not guard.buckets[ONE].is_closed and guard.buckets[ONE].ratio > 1.9
    assert guard.buckets[ONE].num_closings == 0


def test_broken_promises_keep_a_large_one_waiting_for_a_short_time_only():
    guard = DraftGuard()
    for promise in (Promise.SOME, Promise.STRONG):
        waits = []
        for _ in range(4):
            while guard.next_arm(ONE, promise=promise, may_try=False) is not Arm.OPEN:
                guard.record(ONE, False, 0.01, 0.01, is_probe=False)
            opened_s = guard.busy_s
            while not guard.buckets[ONE].is_closed:
                guard.record(ONE, True, 0.01, 0.03, is_probe=False)
            waits.append(opened_s)
        between = [later - earlier for earlier, later in zip(waits, waits[1:], strict=False)]
        if promise is Promise.SOME:
            assert between[2] > 3 * between[1] > 9 * between[0]
        else:
            assert max(between) < 5.0
