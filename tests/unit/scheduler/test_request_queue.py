from __future__ import annotations

from quire.core.request import Request
from quire.scheduler.request_queue import RequestQueue
from tests.unit.scheduler.harness import make_request


def waiting(handle: int, rank: int | None = None) -> Request:
    return Request.from_message(make_request(handle), handle if rank is None else rank)


def test_the_smallest_rank_is_served_first():
    queue = RequestQueue()
    for handle in (4, 5, 6):
        queue.add(waiting(handle))
    assert queue.peek().handle == 4
    assert [queue.pop().handle for _ in range(3)] == [4, 5, 6]
    assert len(queue) == 0


def test_a_request_that_returns_takes_its_old_place():
    queue = RequestQueue()
    for handle, rank in ((1, 10), (2, 30), (3, 20)):
        queue.add(waiting(handle, rank))
    assert [queue.pop().handle for _ in range(3)] == [1, 3, 2]


def test_a_request_is_removed_wherever_it_stands():
    queue = RequestQueue()
    for handle in range(4):
        queue.add(waiting(handle))
    removed = [queue.remove(handle) for handle in (0, 2)]
    assert [request.handle for request in removed if request] == [0, 2]
    assert queue.remove(2) is None and queue.remove(99) is None
    assert len(queue) == 2
    assert [queue.pop().handle for _ in range(2)] == [1, 3]
