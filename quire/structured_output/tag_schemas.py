"""The JSON schemas, regular expressions and tokens in a structural tag. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

KEYS = ("schema", "json_schema")


def schemas_of(tag: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, schema) of every schema in `tag`."""
    for key, item in _items(tag):
        at = f"{path}/{key}"
        if key in KEYS:
            yield at, item
        else:
            yield from schemas_of(item, at)


def with_schemas(tag: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of `tag` with every schema changed."""
    if isinstance(tag, dict):
        return {key: change(item) if key in KEYS else with_schemas(item, change) for key, item in tag.items()}
    return [with_schemas(item, change) for item in tag] if isinstance(tag, list) else tag


def regexes_of(tag: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, pattern) of every regular expression in `tag`."""
    if isinstance(tag, dict) and tag.get("type") == "regex":
        yield f"{path}/pattern", tag["pattern"]
    for key, item in _items(tag):
        if key not in KEYS:
            yield from regexes_of(item, f"{path}/{key}")


def with_regexes(tag: Any, change: Callable[[str], str]) -> Any:
    """A copy of `tag` with every regular expression changed."""
    if isinstance(tag, dict) and tag.get("type") == "regex":
        return {**tag, "pattern": change(tag["pattern"])}
    if isinstance(tag, dict):
        return {key: item if key in KEYS else with_regexes(item, change) for key, item in tag.items()}
    return [with_regexes(item, change) for item in tag] if isinstance(tag, list) else tag


def token_ids_of(tag: Any) -> frozenset[int]:
    """The tokens that `tag` names by their ids."""
    if isinstance(tag, dict) and tag.get("type") == "token":
        return frozenset((tag["token"],)) if isinstance(tag.get("token"), int) else frozenset()
    found = [token_ids_of(item) for key, item in _items(tag) if key not in KEYS]
    return frozenset().union(*found)


def _items(tag: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tag, dict):
        yield from tag.items()
    elif isinstance(tag, list):
        yield from enumerate(tag)
