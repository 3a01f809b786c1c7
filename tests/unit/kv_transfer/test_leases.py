"""Blocks are kept for decode engines until they are read, late, or too many; a lease that ended never comes back."""

from __future__ import annotations

from quire.kv_transfer.pull.leases import MAX_REMEMBERED, Leases

NAMES = [bytes([number]) * 32 for number in range(8)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_blocks_are_found_by_their_names_alone():
    leases = Leases(10.0, 100)
    leases.add("a", NAMES[:4], [5, 6, 7, 8])
    assert leases.block_ids("a", 0, NAMES[:4]) == [5, 6, 7, 8]
    assert leases.block_ids("a", 2, NAMES[2:4]) == [7, 8]
    for first, names in ((0, NAMES[1:3]), (3, NAMES[3:5]), (9, NAMES[:1])):
        assert leases.block_ids("a", first, names) is None
    assert leases.block_ids("b", 0, NAMES[:1], wait_s=0.01) is None


def test_a_lease_ends_once_and_is_reported_once():
    leases = Leases(10.0, 100)
    leases.add("a", NAMES[:1], [5])
    assert leases.release("a") and not leases.release("a")
    assert leases.take_ended() == {"a"} and leases.take_ended() == set()
    assert leases.block_ids("a", 0, NAMES[:1], wait_s=60.0) is None, "nothing waits for a lease that has ended"
    assert not leases.release("a", wait_s=60.0) and len(leases) == 0


def test_a_lease_that_is_not_asked_for_expires():
    clock = Clock()
    leases = Leases(10.0, 100, clock)
    leases.add("a", NAMES[:1], [5])
    leases.add("b", NAMES[:1], [6])
    clock.now = 9.0
    assert leases.block_ids("a", 0, NAMES[:1]) == [5] and leases.expire() == 0
    clock.now = 11.0
    assert leases.expire() == 1 and leases.take_ended() == {"b"}
    assert not leases.release("b"), "what was read of it may be of another request"
    clock.now = 19.0
    assert leases.expire() == 1 and leases.take_ended() == {"a"}


def test_the_oldest_leases_end_when_too_many_blocks_are_kept():
    leases = Leases(10.0, 6)
    for number, name in enumerate("abcd"):
        leases.add(name, NAMES[:2], [2 * number, 2 * number + 1])
    assert leases.expire() == 1 and leases.take_ended() == {"a"}
    leases.add("e", NAMES[:8], list(range(8, 16)))
    assert leases.expire() == 4 and len(leases) == 0, "one that is larger than all of them is not kept"


def test_few_ended_leases_are_remembered():
    leases = Leases(10.0, 100)
    for number in range(MAX_REMEMBERED + 1):
        leases.add(str(number), NAMES[:1], [1])
        leases.release(str(number))
    assert len(leases._ended) == MAX_REMEMBERED
