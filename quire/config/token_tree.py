"""The tree in `speculative_token_tree`, in vLLM's spelling: a list of paths, each of ranks. Pure.

Example: "[(0,), (1,), (0, 0), (0, 1)]": two tokens for the first place, and behind the likeliest of them two more.
"""

from __future__ import annotations

import json
import re

from quire.errors import ConfigError

Tree = tuple[tuple[int, ...], ...]
"""Distinct paths; each begins with one that comes before it, or has one rank: 0 = the likeliest token of its place."""

MAX_PATHS = 64
MAX_DEPTH = 16
MAX_RANK = 15


def parse_tree(text: str) -> Tree:
    """The paths in `text`, short ones first.

    Raises:
        ConfigError: it is no such list, or a path without the one it continues.
    """
    paths = [tuple(path) for path in _lists(text)]
    if not 0 < len(paths) <= MAX_PATHS or len(set(paths)) < len(paths):
        raise _error(f"has {len(paths)} paths, or one twice", f"give 1 to {MAX_PATHS} paths, each once")
    known = set(paths)
    for path in paths:
        if not 0 < len(path) <= MAX_DEPTH or max(path) > MAX_RANK:
            raise _error(f"has the path {path}", f"a path has 1 to {MAX_DEPTH} ranks, each between 0 and {MAX_RANK}")
        if len(path) > 1 and path[:-1] not in known:
            raise _error(f"has the path {path} without {path[:-1]}", f"add {path[:-1]}")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _lists(text: str) -> list[list[int]]:
    """The numbers: brackets, parentheses, commas, and digits alone."""
    found = None
    if len(text) <= 4096 and re.fullmatch(r"[\[\](), 0-9]*", text):
        try:
            found = json.loads(re.sub(r",\s*\]", "]", text.replace("(", "[").replace(")", "]")))
        except (ValueError, RecursionError):
            found = None
    is_right = isinstance(found, list) and all(
        isinstance(path, list) and all(isinstance(rank, int) for rank in path) for path in found
    )
    if not is_right:
        raise _error("is not a list of paths", 'write it as in "[(0,), (1,), (0, 0)]"')
    assert isinstance(found, list)
    return found


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError(f"speculative_config: speculative_token_tree {message}", hint=hint, field="speculative_config")
