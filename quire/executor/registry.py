"""Executors by the names that `distributed_executor_backend` has, those of plugins included. No state."""

from __future__ import annotations

from quire.executor.base import Executor
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.uniproc import UniProcExecutor
from quire.plugins import EXECUTOR, load_plugin, unknown_choice

EXECUTORS: dict[str, type[Executor]] = {"uni": UniProcExecutor, "mp": MultiprocExecutor}


def executor_class(name: str) -> type[Executor]:
    """The class of this name.

    Raises:
        ConfigError: there is none, or a plugin's cannot be used.
    """
    if name == "ray":
        from quire.executor.on_ray import RayExecutor  # late: few need it

        return RayExecutor
    found: type[Executor] | None = EXECUTORS.get(name) or load_plugin(EXECUTOR, name, Executor)
    if found is None:
        raise unknown_choice(EXECUTOR, name, [*EXECUTORS, "ray"])
    return found
