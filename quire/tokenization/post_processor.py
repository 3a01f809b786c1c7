"""Bounds what a tokenizer.json puts around every text, before the library that would do it reads the file. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MAX_BYTES = 1 << 20
MAX_ADDED_IDS = 4096
"""Around one text, or a pair; models add one to three."""


class _Parts(msgspec.Struct):
    post_processor: msgspec.Raw = msgspec.Raw(b"null")


def problem_of(content: str) -> str | None:
    """Why a tokenizer.json asks for too much; None = it does not, or is malformed, which its reader says better."""
    try:
        raw = msgspec.json.decode(content, type=_Parts).post_processor
        if len(raw) > MAX_BYTES:
            return f"its post_processor has {len(raw)} bytes, at most {MAX_BYTES} are allowed"
        num_ids = sum(_added_ids(one) for one in _processors(msgspec.json.decode(raw)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if num_ids > MAX_ADDED_IDS:
        return f"its post_processor adds {num_ids} tokens to each input, at most {MAX_ADDED_IDS} are allowed"
    return None


def _processors(processor: Any) -> Iterator[dict[str, Any]]:
    """A processor and those in it."""
    if not isinstance(processor, dict):
        return
    yield processor
    inner = processor.get("processors")
    for one in inner if isinstance(inner, list) else ():
        yield from _processors(one)


def _added_ids(processor: dict[str, Any]) -> int:
    """Ids that the longer of a processor's templates adds."""
    tokens = processor.get("special_tokens")
    lengths = {}
    for name, token in tokens.items() if isinstance(tokens, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        lengths[name] = len(ids) if isinstance(ids, list) else 1
    return max(_template_ids(processor.get(name), lengths) for name in ("single", "pair"))


def _template_ids(template: Any, lengths: dict[str, int]) -> int:
    num_ids = 0
    for piece in template if isinstance(template, list) else ():
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        num_ids += lengths.get(str(special.get("id")), 1) if isinstance(special, dict) else 1
    return num_ids
