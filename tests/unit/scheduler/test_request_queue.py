from __future__ import annotations

import pytest

from quire.core.request import Request
from quire.errors import ConfigError
from quire.scheduler.request_queue import make_request_queue
from tests.unit.scheduler.harness import make_request


def waiting(handle: int, arrival: int | None = None) -> Request:
    return Request.from_message(make_request(handle), handle if arrival is None else arrival)


def test_first_come_is_first_served():
    queue = make_request_queue("fcfs")
    for handle in (4, 5, 6):
        queue.add(waiting(handle))
    assert queue.peek().handle == 4
    assert [queue.pop().handle for _ in range(3)] == [4, 5, 6]
    assert len(queue) == 0


def test_a_request_that_returns_takes_its_old_place():
    queue = make_request_queue("fcfs")
    for handle, arrival in ((1, 10), (2, 30), (3, 20)):
        queue.add(waiting(handle, arrival))
    assert [queue.pop().handle for _ in range(3)] == [1, 3, 2]


def test_a_request_is_removed_wherever_it_stands():
    queue = make_request_queue("fcfs")
    for handle in range(4):
        queue.add(waiting(handle))
    removed = [queue.remove(handle) for handle in (0, 2)]
    assert [request.handle for request in removed if request] == [0, 2]
    assert queue.remove(2) is None and queue.remove(99) is None
    assert len(queue) == 2
    assert [queue.pop().handle for _ in range(2)] == [1, 3]


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'fcfs'"):
        make_request_queue("fcf")
