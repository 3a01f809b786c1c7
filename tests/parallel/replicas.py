"""Replicas that share experts as threads of one process, each with an engine of its own; as `ranks` for ranks."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import LLM
from quire.core.expert_group import ExpertGroup
from quire.executor import registry
from quire.executor.uniproc import UniProcExecutor
from tests.parallel.ranks import ThreadedRanks
from tests.unit.distributed.test_communicator import on_ranks

T = TypeVar("T")
LOOK_S = 0.02


@contextmanager
def expert_groups(count: int) -> Iterator[list[ExpertGroup]]:
    """The places of `count` replicas in a group."""
    fds = [os.memfd_create("quire-experts"), *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(count))]
    try:
        yield [ExpertGroup(replica, fds[0], fds[1:], 60.0) for replica in range(count)]
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def replicas_as_threads(model: str | Path, count: int, **settings: Any) -> Iterator[list[LLM]]:
    """Engines that share the experts of a model; `on_replicas` runs them."""
    places = threading.local()

    def made(kind: Callable[..., UniProcExecutor], *args: Any) -> UniProcExecutor:
        return kind(*args, experts=places.group)

    with expert_groups(count) as groups, pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setitem(registry.EXECUTORS, "uni", partial(made, UniProcExecutor))  # type: ignore[arg-type]
        patch.setitem(registry.EXECUTORS, "mp", partial(made, ThreadedRanks))  # type: ignore[arg-type]

        def make(replica: int) -> LLM:
            places.group = groups[replica]
            return LLM(str(model), enable_expert_parallel=True, **settings)

        llms = on_ranks(count, make)
        for llm in llms:
            stack.enter_context(llm)
        yield llms


def on_replicas(llms: Sequence[LLM], body: Callable[[int, LLM], T]) -> list[T]:
    """What `body(replica, llm)` returns on each, all at once; those that are done take part in what others compute."""
    left = [len(llms)]

    def run(replica: int) -> T:
        llm = llms[replica]
        lock_step = llm.llm_engine.call_worker(lambda worker: worker.lock_step)
        try:
            return body(replica, llm)
        finally:
            left[0] -= 1
            while left[0]:
                select.select([lock_step.bell], [], [], LOOK_S)
                lock_step.join()

    return on_ranks(len(llms), run)
