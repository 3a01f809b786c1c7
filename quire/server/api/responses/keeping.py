"""Opens the store that the settings ask for. No state."""

from __future__ import annotations

from quire.config.server import ResponsesConfig
from quire.server.api.responses.sqlite_backend import SqliteBackend, check_path
from quire.server.api.responses.store import MemoryShelf, ResponseStore, ShelfLimits, StoreBackend

MEMORY, NONE = "memory", "none"


def open_store(config: ResponsesConfig) -> ResponseStore | None:
    """Where responses are kept; None = nowhere.

    Raises:
        ConfigError: the file cannot be used.
    """
    shelf = open_shelf(config)
    return None if shelf is None else ResponseStore(shelf)


def open_shelf(config: ResponsesConfig) -> StoreBackend | None:
    """What is below such a store; as `open_store`."""
    if config.response_store == NONE:
        return None
    if config.response_store == MEMORY:
        return MemoryShelf(_limits(config))
    return SqliteBackend(config.response_store, _limits(config))


def check_store(config: ResponsesConfig) -> None:
    """Refuse a file that cannot be used, before anything costly is started.

    Raises:
        ConfigError: so it is.
    """
    if config.response_store not in (MEMORY, NONE):
        check_path(config.response_store, _limits(config))


def _limits(config: ResponsesConfig) -> ShelfLimits:
    return ShelfLimits(
        config.response_store_max_responses, config.response_store_max_bytes, config.response_store_max_age
    )
