"""Stat loggers: one counts tokens, one fails."""

from __future__ import annotations

from quire.core.engine_messages import EngineCoreOutputs
from quire.engine.stat_loggers import StatLoggerBase


class Counter(StatLoggerBase):
    """Counts the tokens of all engines."""

    quire_contract = 1
    num_tokens = 0

    def record(self, step: EngineCoreOutputs) -> None:
        Counter.num_tokens += len(step.handles)


class Broken(StatLoggerBase):
    quire_contract = 1
    num_calls = 0

    def record(self, step: EngineCoreOutputs) -> None:
        Broken.num_calls += 1
        raise OSError("no route to the database")
