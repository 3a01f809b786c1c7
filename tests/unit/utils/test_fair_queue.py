"""Owners of a fair queue take turns."""

from __future__ import annotations

from quire.utils.fair_queue import FairQueue


def test_a_flood_of_one_owner_delays_anothers_item_by_one_of_its_own():
    queue: FairQueue[int] = FairQueue()
    for number in range(64):
        queue.put("alice", number)
    assert queue.pop() == 0
    queue.put("bob", 100)
    queue.put("bob", 101)
    assert [queue.pop() for _ in range(5)] == [1, 100, 2, 101, 3] and len(queue) == 60


def test_items_of_one_owner_come_in_their_order_and_the_queue_forgets_owners_without_items():
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.put("", item)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"] and len(queue) == 0 and not queue._items


def test_owners_that_may_not_go_on_are_passed_over_and_keep_their_turn():
    queue: FairQueue[int] = FairQueue()
    for owner, number in (("alice", 0), ("alice", 1), ("bob", 2)):
        queue.put(owner, number)
    assert queue.pop_from(lambda owner: owner == "bob") == 2
    assert queue.pop_from(lambda owner: owner == "bob") is None and len(queue) == 2
    assert [queue.pop(), queue.pop()] == [0, 1]
