"""References within a JSON schema. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def resolves(schema: Any, reference: str) -> bool:
    """Whether there is something at `reference`; of anchors, which few libraries know, it is not asked."""
    return not reference.startswith("#/") or bool(list(_targets(schema, reference)))


def find_cycle(schema: Any) -> str | None:
    """A reference that leads back to itself; None when there is none. Each is looked at once."""
    done: set[str] = set()
    for start in _references(schema):
        open_ones: list[tuple[str, Iterator[str]]] = []
        entered = {start} - done
        if entered:
            open_ones.append((start, _behind(schema, start)))
        while open_ones:
            reference, inner = open_ones[-1]
            following = next(inner, None)
            if following is None:
                done.add(reference)
                entered.discard(reference)
                open_ones.pop()
            elif following in entered:
                return following
            elif following not in done:
                entered.add(following)
                open_ones.append((following, _behind(schema, following)))
    return None


def _behind(schema: Any, reference: str) -> Iterator[str]:
    for target in _targets(schema, reference):
        yield from _references(target)


def _references(schema: Any) -> Iterator[str]:
    stack = [schema]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)


def _targets(schema: Any, reference: str) -> Iterator[Any]:
    """What `reference` (#, or a pointer behind #) names: one thing or nothing."""
    at = schema
    for part in reference[2:].split("/") if reference.startswith("#/") else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict) and name in at:
            at = at[name]
        else:
            return
    if reference == "#" or reference.startswith("#/"):
        yield at
