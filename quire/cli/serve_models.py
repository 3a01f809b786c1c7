"""`quire serve --models FILE`: one server, several models. Called by `serve`; `run` makes its server here, too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config.server import ServerConfig
from quire.config.switching import ModelsFile, check_defaults, read_models_file
from quire.errors import ConfigError
from quire.utils.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.server.launcher import DrainingServer
    from quire.server.switching.pool import ModelPool


def add_models_argument(parser: argparse.ArgumentParser) -> None:
    """Add --models."""
    parser.add_argument(
        "--models", metavar="FILE",
        help="YAML or JSON file of several models, which are loaded on first use within memory_budget and unloaded for "
        "each other (docs/how-to/many-models.md). Flags of the engine are defaults of all of them.",
    )  # fmt: skip


def read_models(path: str, engine: Mapping[str, Any]) -> ModelsFile:
    """The models of file `path`.

    Args:
        engine: settings for all of them, by name.

    Raises:
        ConfigError, UnsupportedError: the file, the model and the setting are named.
    """
    if engine.get("model") is not None or engine.get("served_model_name") is not None:
        raise ConfigError(
            "--models names the models; a model and --served-model-name are for a server of one",
            hint="leave out one of the two", field="models",
        )  # fmt: skip
    check_defaults(engine)
    return read_models_file(path, engine)


def make_models_server(
    file: ModelsFile, server_config: ServerConfig, policy: str, timer: PhaseTimer | None = None
) -> tuple[ModelPool, DrainingServer]:
    """A server of the models of `file`, with the pinned ones loaded, not yet listening.

    `pool.shutdown()` follows, whatever becomes of the server.

    Args:
        policy: scheduling_policy of the engines.
        timer: gets the phases.

    Raises:
        QuireError: the keys, TLS files or the file of responses cannot be used, or a pinned model cannot be loaded.
    """
    timer = timer or PhaseTimer()
    envs.prefer_sleeping_threads()
    with timer.phase("web framework"):
        from quire.server.app import make_pool_app
        from quire.server.http.keys import read_checked_keys
        from quire.server.launcher import server_of
        from quire.server.switching.pool import make_pool

    pool = make_pool(server_config, read_checked_keys(server_config, policy), file)
    try:
        with timer.phase("pinned models"):
            pool.load_pinned()
        with timer.phase("application"):
            return pool, server_of(make_pool_app(pool, policy), server_config)
    except BaseException:
        pool.shutdown()
        raise
