"""Work that takes long is not waited for, and what stands behind it is done by others."""

from __future__ import annotations

import threading

from quire.structured_output.crew import MAX_THREADS, Crew

TIMEOUT_S = 60.0


def test_all_work_is_done_when_it_is_settled_in_its_order():
    crew, done = Crew(), []
    for number in range(1, 51):
        crew.put([lambda n=n: done.append(n) for n in range(8)])  # type: ignore[misc]
        while len(done) < 8 * number:
            crew.settle()
    assert done == [*range(8)] * 50
    crew.close()


def test_what_stands_behind_work_that_takes_long_is_done():
    crew, gate, done = Crew(), threading.Event(), threading.Event()
    crew.put([lambda: gate.wait(TIMEOUT_S) and None, done.set])
    while not done.is_set():
        crew.settle()
    assert not gate.is_set()
    gate.set()
    crew.close()


def test_there_are_so_many_threads_and_no_more_and_those_that_come_back_go_on():
    crew, gate, done = Crew(), threading.Event(), threading.Event()
    begun = threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        gate.wait(TIMEOUT_S)

    crew.put([*[wait] * MAX_THREADS, done.set])
    for _ in range(MAX_THREADS):
        while not begun.acquire(blocking=False):
            crew.settle()
    crew.settle()
    assert not done.is_set()
    gate.set()
    assert done.wait(TIMEOUT_S)
    crew.close()
