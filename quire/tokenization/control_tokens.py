"""Keeps users from writing control tokens: what they typed never becomes one, whatever the chat template does with it.

Used by the server around a chat template. The users' texts are marked before rendering, wherever a control token's
name could begin; in the rendered prompt, a name without a mark was written by the template. Owns what it knows of one
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.tokenization.tokenizer import Tokenizer

MARKS = [chr(code) for code in range(0xE100, 0xE140)]


class ControlTokens:
    """The control tokens of one vocabulary: those that `skip_special_tokens` leaves out of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = sorted(tokenizer.special_ids)
        names = tokenizer.convert_ids_to_tokens(ids)
        self._ids = {name: token_id for name, token_id in zip(names, ids, strict=True) if name}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        first_characters = "".join(sorted({name[0] for name in self._ids}))
        self._beginnings = re.compile(f"[{re.escape(first_characters)}]" if first_characters else r"(?!)")

    def is_named_in(self, text: str) -> bool:
        """True when `text` holds the name of a control token."""
        return self._names.search(text) is not None

    def mark(self, values: Any) -> tuple[Any, str]:
        """A copy of `values` (texts in lists and dicts) without any whole name of a control token, and the mark used.

        The mark is "" when nothing had to be marked.
        """
        texts = list(_texts(values))
        if not any(map(self._beginnings.search, texts)):
            return values, ""
        mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), "")
        if not mark:  # every candidate was typed: the typed ones go
            mark, values = MARKS[0], _mapped(values, lambda text: text.replace(MARKS[0], ""))
        return _mapped(values, lambda text: self._beginnings.sub(lambda found: found[0] + mark, text)), mark

    def encode(self, rendered: str, mark: str) -> tuple[str, list[int]]:
        """The prompt that a template made of marked values, and its ids; control tokens are the template's alone."""
        if not mark:
            return rendered, self._tokenizer.encode(rendered, add_special_tokens=False)
        text = rendered.replace(mark, "")
        if len(self._names.findall(text)) == len(self._names.findall(rendered)):
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        start = 0
        for found in self._names.finditer(rendered):
            ids += self._plain(rendered[start : found.start()], mark)
            ids.append(self._ids[found[0]])
            start = found.end()
        return text, ids + self._plain(rendered[start:], mark)

    def _plain(self, part: str, mark: str) -> list[int]:
        text = part.replace(mark, "")
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=False) if text else []


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name) if isinstance(name, str) else name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
