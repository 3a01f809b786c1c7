"""Config files in YAML: plain values only, no tags, no aliases, no name twice. Called by `args`; no state."""

from __future__ import annotations

from typing import Any

import yaml

from quire.errors import ConfigError

MAX_EVENTS = 20_000
MAX_DEPTH = 16


def parse_yaml(path: str, text: bytes) -> list[tuple[str, Any]]:
    """(name, value) of every entry of the one mapping in `text`, in order, doubles included.

    Raises:
        ConfigError: it is not YAML, uses aliases, or is not one mapping.
    """
    try:
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"config file {path} uses aliases", hint="write the value out", field="config")
            if count > MAX_EVENTS or depth > MAX_DEPTH:
                raise ConfigError(
                    f"config file {path} has too many or too deep entries", hint="keep settings only", field="config"
                )
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"config file {path} is not one mapping", hint="write lines of setting: value", field="config"
            )
        loader = yaml.SafeLoader(b"")
        return [
            (str(loader.construct_object(key)), loader.construct_object(value, deep=True)) for key, value in node.value
        ]
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"config file {path} is not YAML: {reason}", hint="write lines of setting: value", field="config"
        ) from None
