"""A structural tag as a Lark grammar of llguidance, as far as one can say it. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


class UnsupportedTagError(Exception):
    """A part that Lark has no words for; says which."""


def lark_problem(tag: Any) -> str | None:
    """Why `tag` cannot be said in Lark; None when it can."""
    try:
        _Rules({}).start(tag)
    except UnsupportedTagError as error:
        return str(error)
    return None


def lark_of(tag: Any, options: Mapping[str, Any]) -> str:
    """The grammar of a tag that has no problem.

    Args:
        options: how JSON is written, in llguidance's words.
    """
    return _Rules(options).start(tag)


class _Rules:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._lines: list[str] = []

    def start(self, tag: Any) -> str:
        form = tag.get("format") if isinstance(tag, Mapping) else None
        if not isinstance(form, Mapping):
            raise UnsupportedTagError("a tag without format is not supported")
        start = self._said(form)
        return "\n".join([f"start: {start}", *self._lines])

    def _said(self, form: Any) -> str:
        """An expression for `form`."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        say = self.SAYINGS.get(str(kind))
        if say is None:
            raise UnsupportedTagError(f"{kind} is not supported")
        return say(self, form)

    def _rule(self, body: str) -> str:
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _text(self, form: Mapping[str, Any]) -> str:
        value = form.get("value")
        if not isinstance(value, str):
            raise UnsupportedTagError("const_string without value is not supported")
        return json.dumps(value, ensure_ascii=False)

    def _token(self, form: Mapping[str, Any]) -> str:
        if not isinstance(form.get("token"), int):
            raise UnsupportedTagError("token without its id is not supported")
        return f"<[{form['token']}]>"

    def _json(self, form: Mapping[str, Any]) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, dict) or form.keys() - {"type", "json_schema", "max_whitespace_cnt"}:
            raise UnsupportedTagError("json_schema with more than an object is not supported")
        options, limit = self._options, form.get("max_whitespace_cnt")
        if limit is not None and options.get("whitespace_flexible", True) and "whitespace_pattern" not in options:
            options = {**options, "whitespace_pattern": rf"[ \t\n\r]{{0,{limit}}}"}
        return self._rule(f"%json {json.dumps({'x-guidance': options, **schema}, ensure_ascii=False)}")

    def _sequence(self, form: Mapping[str, Any]) -> str:
        return "(" + " ".join(self._said(one) for one in form.get("elements") or [{}]) + ")"

    def _or(self, form: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(self._said(one) for one in form.get("elements") or [{}]))

    def _plus(self, form: Mapping[str, Any]) -> str:
        return f"({self._said(form.get('content'))})+"

    def _star(self, form: Mapping[str, Any]) -> str:
        return f"({self._said(form.get('content'))})*"

    def _optional(self, form: Mapping[str, Any]) -> str:
        return f"({self._said(form.get('content'))})?"

    def _tag(self, form: Mapping[str, Any]) -> str:
        parts = [_edge(form.get("begin")), form.get("content"), _edge(form.get("end"))]
        return " ".join(self._said(one) for one in parts if one != _edge(""))

    def _tags(self, form: Mapping[str, Any]) -> str:
        separator = form.get("separator")
        if not form.get("at_least_one") or form.get("stop_after_first") or not separator:
            raise UnsupportedTagError("tags_with_separator without at_least_one is not supported")
        tag = self._rule(" | ".join(self._said(one) for one in form.get("tags") or [{}]))
        return f"{tag} ({self._said(_edge(separator))} {tag})*"

    SAYINGS: Mapping[str, Callable[[Any, Mapping[str, Any]], str]] = {
        "const_string": _text,
        "token": _token,
        "json_schema": _json,
        "sequence": _sequence,
        "or": _or,
        "plus": _plus,
        "star": _star,
        "optional": _optional,
        "tag": _tag,
        "tags_with_separator": _tags,
    }


TAGS = frozenset(_Rules.SAYINGS)
"""Types of formats that it can say."""


def _edge(value: Any) -> Any:
    """The beginning or end of a tag, or a separator, as a form of its own."""
    return {"type": "const_string", "value": value} if isinstance(value, str) else value
