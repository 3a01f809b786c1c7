"""StepLogs: what an engine logs of its steps: the line with its state, and loggers of plugins. Owns their timers.

Fed with whole steps by what supervises the cores: `AsyncLLM`, or the owner of several front ends.
"""

from __future__ import annotations

import asyncio

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.engine.stat_logger import INTERVAL_S, StatLogger
from quire.engine.stat_loggers import StatLoggers


class StepLogs:
    """The logs of one engine.

    Args:
        config: resolved.
        names_replicas: lines name the replica that they are about.
    """

    def __init__(self, config: QuireConfig, *, names_replicas: bool) -> None:
        self._names_replicas = names_replicas
        self._is_shown = not config.observability.disable_log_stats
        self._loggers: dict[int, StatLogger] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._plugins = StatLoggers(config)
        self._has_plugins = bool(config.observability.stat_loggers)

    def record(self, step: EngineCoreOutputs) -> None:
        """Take in one step, on the event loop."""
        if self._is_shown:
            self._logger(step.engine_index).record(step)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)
        if self._has_plugins:
            self._plugins.record(step)

    def flush(self) -> None:
        """Log what came since the last line; the next step starts the timer anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for one in self._loggers.values():
            one.flush()

    def close(self) -> None:
        """Log nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._plugins.close()

    def _logger(self, engine_index: int) -> StatLogger:
        """That of a replica."""
        found = self._loggers.get(engine_index)
        if found is None:
            name = f"replica {engine_index}: " if self._names_replicas else ""
            found = self._loggers[engine_index] = StatLogger(name=name)
        return found
