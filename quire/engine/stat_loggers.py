"""Stat loggers of other packages: called with every step, next to the log line and the metrics that Quire has itself.

Made by the engines; they run in the front-end's process, on the thread that takes in steps. One that raises is left out
from then on: no request is affected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.errors import ConfigError, QuireError
from quire.logger import get_logger
from quire.plugins import STAT_LOGGER, load_plugin, unknown_choice

logger = get_logger(__name__)


class StatLoggerBase(ABC):
    """Takes in what an engine counts.

    Args:
        config: of the engine, resolved.
    """

    def __init__(self, config: QuireConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, step: EngineCoreOutputs) -> None:
        """A step's outputs came: `step.stats` has the scheduler's counts. Called within the step: to be quick."""

    def close(self) -> None:  # noqa: B027 (to have nothing to close is usual)
        """The engine ends."""


class StatLoggers:
    """The stat loggers that the settings name.

    Raises:
        ConfigError: one of them cannot be made.
    """

    def __init__(self, config: QuireConfig) -> None:
        self._loggers = [_made(stat_logger_class(name), config) for name in config.observability.stat_loggers]

    def record(self, step: EngineCoreOutputs) -> None:
        """Tell all of them of a step."""
        for one in tuple(self._loggers):
            try:
                one.record(step)
            except Exception as error:  # foreign code: no request may end with it
                self._loggers.remove(one)
                name = f"{type(one).__module__}:{type(one).__qualname__}"
                logger.error("stat logger %s failed and is disabled", name, exc_info=error)

    def close(self) -> None:
        """Close all of them; harmless when repeated."""
        loggers, self._loggers = self._loggers, []
        for one in loggers:
            try:
                one.close()
            except Exception as error:  # as above
                logger.error("stat logger %s failed while closing", type(one).__qualname__, exc_info=error)


def stat_logger_class(name: str) -> type[StatLoggerBase]:
    """The stat logger of this name.

    Raises:
        ConfigError: no package has it, or it cannot be used.
    """
    found: type[StatLoggerBase] | None = load_plugin(STAT_LOGGER, name, StatLoggerBase)
    if found is None:
        raise unknown_choice(STAT_LOGGER, name, [])
    return found


def _made(kind: type[StatLoggerBase], config: QuireConfig) -> StatLoggerBase:
    try:
        return kind(config)
    except QuireError:
        raise
    except Exception as error:
        raise ConfigError(
            f"stat logger {kind.__module__}:{kind.__qualname__} cannot be created: {type(error).__name__}: {error}",
            hint="correct the plugin, or leave it out of stat_loggers", field=STAT_LOGGER.setting,
        ) from error  # fmt: skip
