"""Giving memory back to the system."""

from __future__ import annotations

import weakref

from quire.utils.heap import give_back_free_memory


class Body:
    """Stands for a large body, held by a cycle as an error and its traceback hold one."""

    def __init__(self) -> None:
        self.itself = self


def test_what_only_a_cycle_holds_is_given_back():
    body = weakref.ref(Body())
    give_back_free_memory()
    assert body() is None
