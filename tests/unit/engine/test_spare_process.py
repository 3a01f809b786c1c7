"""Processes that wait to become engine cores: what is not needed ends, and what has ended is not used."""

from __future__ import annotations

from quire.engine.spare_process import SpareProcess, SpareProcesses


def test_a_spare_process_is_taken_once_and_another_takes_its_place():
    spares = SpareProcesses()
    spares.prepare()
    spares.prepare()  # there is one
    first = spares.take()
    assert first is not None and spares.take() is None
    spares.prepare()
    second = spares.take()
    assert second is not None and second is not first
    for spare in (first, second):
        spare.close()


def test_a_spare_process_that_was_not_needed_ends():
    spare = SpareProcess()
    taken = spare.take()
    assert taken is not None
    child, _ = taken
    assert child.poll() is None
    spare.close()
    assert child.poll() is not None


def test_a_spare_process_that_has_ended_is_not_taken():
    spare = SpareProcess()
    taken = spare.take()
    assert taken is not None
    taken[0].kill()
    taken[0].wait()
    assert spare.take() is None


def test_none_is_started_after_the_end():
    spares = SpareProcesses()
    spares.close()
    spares.prepare()
    assert spares.take() is None
