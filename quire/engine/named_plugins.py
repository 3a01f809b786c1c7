"""The plugins that a configuration names: which they are, and whether they can be used. No state.

Called when a configuration is resolved, for the log, and by the engine core, before it reads any weight. What loads a
plugin is imported where one is named: most configurations name none, and the start waits for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from quire.attention.block_sizes import PREFERRED_BLOCK_SIZES
from quire.config import QuireConfig
from quire.config.device import OWN_EXECUTORS
from quire.config.families.registry import FAMILIES
from quire.config.model import OWN_QUANTIZATIONS, STORED_QUANTIZATIONS
from quire.config.scheduler import OWN_POLICIES
from quire.config.structured_outputs import BACKENDS
from quire.logger import get_logger
from quire.plugins import (
    ATTENTION_BACKEND,
    EXECUTOR,
    GRAMMAR_BACKEND,
    KINDS,
    KV_CONNECTOR,
    LOGITS_PROCESSOR,
    MODEL,
    QUANTIZATION,
    REASONING_PARSER,
    SCHEDULER,
    SCHEDULING_POLICY,
    STAT_LOGGER,
    TOOL_PARSER,
    PluginKind,
    find_plugin,
)

logger = get_logger(__name__)

Loaders = Mapping[PluginKind, Callable[[str], object]]


def note_plugins(config: QuireConfig, logits_processors: Sequence[object] = ()) -> None:
    """Log the plugins that a resolved configuration names, and load those of the front-end, before a core is started.

    Args:
        logits_processors: that are given beside those of the configuration.

    Raises:
        ConfigError: two packages have one of them, only one that QUIRE_PLUGINS does not allow, or it cannot be used.
    """
    given = [*config.model.logits_processors, *logits_processors]
    processors = [(LOGITS_PROCESSOR, name) for name in given if isinstance(name, str) and ":" not in name]
    names = [*_names(config), *processors]
    if not names:
        return
    plugins = [str(plugin) for kind, name in names if (plugin := find_plugin(kind, name)) is not None]
    if plugins:
        logger.info("plugins: %s", ", ".join(plugins))
    from quire.engine.stat_loggers import stat_logger_class
    from quire.parsers.registry import reasoning_parser
    from quire.structured_output.registry import backend_class as grammar_backend_class

    loaders: Loaders = {
        STAT_LOGGER: stat_logger_class, GRAMMAR_BACKEND: grammar_backend_class, REASONING_PARSER: reasoning_parser,
    }  # fmt: skip
    _load(config, loaders)


def check_plugins(config: QuireConfig) -> None:
    """Load what the core's settings name and is not built in.

    Raises:
        ConfigError: one of them cannot be used.
    """
    from quire.attention.selector import backend_class  # these load torch
    from quire.executor.registry import executor_class
    from quire.layers.quantization import quantization_class
    from quire.models.registry import model_class
    from quire.scheduler.policy import plugin_ranking
    from quire.scheduler.setup import scheduler_class

    loaders: Loaders = {
        MODEL: model_class, ATTENTION_BACKEND: backend_class, EXECUTOR: executor_class, SCHEDULER: scheduler_class,
        SCHEDULING_POLICY: plugin_ranking, QUANTIZATION: quantization_class,
    }  # fmt: skip
    _load(config, loaders)


def _load(config: QuireConfig, loaders: Loaders) -> None:
    for kind, name in _names(config):
        if kind in loaders:
            loaders[kind](name)


def built_in_names() -> Mapping[PluginKind, Sequence[str]]:
    """The names of each kind that Quire has itself, which go before those of plugins."""
    from quire.kv_transfer.registry import BUILT_IN
    from quire.parsers.registry import HARMONY_REASONING, PATTERN, REASONING_PARSERS, TOOL_CALL_PARSERS

    names: dict[PluginKind, Sequence[str]] = dict.fromkeys(KINDS, ("auto", "none"))
    return names | {
        MODEL: tuple(FAMILIES),
        ATTENTION_BACKEND: ("auto", *PREFERRED_BLOCK_SIZES),
        EXECUTOR: OWN_EXECUTORS,
        SCHEDULING_POLICY: OWN_POLICIES,
        TOOL_PARSER: ("auto", "none", PATTERN, *TOOL_CALL_PARSERS),
        REASONING_PARSER: ("none", HARMONY_REASONING, *REASONING_PARSERS),
        GRAMMAR_BACKEND: ("auto", *BACKENDS),
        KV_CONNECTOR: tuple(BUILT_IN),
        QUANTIZATION: (*OWN_QUANTIZATIONS, *STORED_QUANTIZATIONS),
    }


def block_sizes(backend: str) -> Mapping[str, int]:
    """Tokens per block that attention backends prefer, `backend` among them, which is loaded where it is a plugin's.

    Raises:
        ConfigError: the plugin cannot be used.
    """
    if backend == "auto" or backend in PREFERRED_BLOCK_SIZES:
        return PREFERRED_BLOCK_SIZES
    from quire.attention.selector import backend_class  # late: loads torch

    return {**PREFERRED_BLOCK_SIZES, backend: backend_class(backend).preferred_block_size}


def _names(config: QuireConfig) -> Iterator[tuple[PluginKind, str]]:
    """Names that are not built in, with what they name."""
    if config.arch is not None and not config.arch.config_json and config.arch.architecture not in FAMILIES:
        yield MODEL, config.arch.architecture
    if config.device.attention_backend not in ("auto", *PREFERRED_BLOCK_SIZES):
        yield ATTENTION_BACKEND, config.device.attention_backend
    if config.parallel.distributed_executor_backend not in OWN_EXECUTORS:
        yield EXECUTOR, config.parallel.distributed_executor_backend
    if config.scheduler.scheduling_policy not in OWN_POLICIES:
        yield SCHEDULING_POLICY, config.scheduler.scheduling_policy
    if config.scheduler.scheduler_cls is not None:
        yield SCHEDULER, config.scheduler.scheduler_cls
    if config.model.quantization is not None and config.model.quantization not in OWN_QUANTIZATIONS:
        yield QUANTIZATION, config.model.quantization
    if config.structured_outputs.backend not in ("auto", *BACKENDS):
        yield GRAMMAR_BACKEND, config.structured_outputs.backend
    reasoning = config.structured_outputs.thinking_parser
    if reasoning:
        from quire.parsers.registry import REASONING_PARSERS

        if reasoning not in REASONING_PARSERS:
            yield REASONING_PARSER, reasoning
    transfer = config.kv_transfer
    if transfer is not None and transfer.kv_connector_module_path is None:
        from quire.kv_transfer.registry import BUILT_IN, ELSEWHERE

        if transfer.kv_connector not in BUILT_IN and transfer.kv_connector not in ELSEWHERE:
            yield KV_CONNECTOR, transfer.kv_connector
    for name in config.observability.stat_loggers:
        yield STAT_LOGGER, name
