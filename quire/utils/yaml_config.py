"""Files in YAML: plain values only, no tags, no aliases, no name twice in a nested mapping.

Called by `args` for config files and by the server for its other files; no state.
"""

from __future__ import annotations

from typing import Any

import yaml

from quire.errors import ConfigError

MAX_EVENTS = 20_000
MAX_DEPTH = 16


def parse_yaml(
    path: str, text: bytes, *, kind: str = "config file", field: str = "config", max_events: int = MAX_EVENTS
) -> list[tuple[str, Any]]:
    """(name, value) of every entry of the one mapping in `text`, in order, doubles included.

    Args:
        kind, field: what the file is, for messages.
        max_events: bound of its size.

    Raises:
        ConfigError: it is not YAML, uses aliases, is not a mapping, or has a nested name twice.
    """
    try:
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{kind} {path} uses aliases", hint="repeat the value instead", field=field)
            if count > max_events or depth > MAX_DEPTH:
                raise ConfigError(
                    f"{kind} {path} has too many or too deep entries", hint="keep settings only", field=field
                )
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{kind} {path} is not a mapping", hint="write lines of setting: value", field=field)
        for _, value in node.value:
            _refuse_doubles(value, f"{kind} {path}", field)
        loader = yaml.SafeLoader(b"")
        return [
            (str(loader.construct_object(key)), loader.construct_object(value, deep=True)) for key, value in node.value
        ]
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{kind} {path} is not YAML: {reason}", hint="write lines of setting: value", field=field
        ) from None


def _refuse_doubles(node: yaml.Node, where: str, field: str) -> None:
    """Raise when a mapping in `node` has a name twice: all but the last would be lost."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        doubles = (
            sorted({str(name) for name in names if names.count(name) > 1})
            if len(set(map(str, names))) < len(names)
            else []
        )
        if doubles:
            raise ConfigError(f"{where} has {doubles[0]!r} twice", hint="keep one of them", field=field)
        for _, value in node.value:
            _refuse_doubles(value, where, field)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(value, where, field)
