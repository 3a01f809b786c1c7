"""Tools: which functions an answer may call, and of what types their parameters are. Read by parsers; no state."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
LITERALS = {"true": True, "false": False, "null": None, "none": None}
MAX_SCHEMA_DEPTH = 8
JSON_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
TYPE_NAMES = {one: one for one in JSON_TYPES} | {  # and what other languages call them
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short", "int32", "int64", "uint", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "float32", "float64"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}


class Tools:
    """Functions that may be called.

    Args:
        tools: as in a request: {"type": "function", "function": {"name", "parameters"}}.
        any_name: every name may be called, those in `tools` or not.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, any_name: bool = False) -> None:
        self._parameters: dict[str, Schema] = {}
        self._any_name = any_name
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = _mapping(_mapping(function.get("parameters")).get("properties"))

    def allows(self, name: str) -> bool:
        """Whether a function of this name may be called."""
        return name in self._parameters or (self._any_name and bool(name))

    def types_of(self, function: str, parameter: str) -> frozenset[str] | None:
        """The JSON types that a parameter may have; empty when its schema does not say; None without a schema."""
        schema = self._parameters.get(function, {}).get(parameter)
        if not isinstance(schema, Mapping):
            return None
        key = (function, parameter)
        if key not in self._types:  # a schema may be large, and a model may name it often
            self._types[key] = types_of_schema(schema)
        return self._types[key]


def types_of_schema(schema: Schema) -> frozenset[str]:
    """The JSON types that a schema names, in JSON Schema's words or another language's; empty when it does not say."""
    named = (
        TYPE_NAMES.get(re.split(r"[\[<]", one, maxsplit=1)[0].strip().lower())
        for one in _types(schema, MAX_SCHEMA_DEPTH)
    )
    return frozenset(filter(None, named))


def json_of(text: str, types: frozenset[str] | None) -> str:
    """JSON text of a parameter that the model wrote without quotes.

    A text stays a text where the schema allows one or says nothing of the parameter; else it is read as a value of
    the schema's types, and is a text if it is none.
    """
    if types is None or "string" in types:
        if types is not None and "null" in types and text == "null":
            return "null"
        return encode(text)
    try:
        value = _parsed(text.strip())
        if not types or _type_name(value) & types:
            return encode(value)
    except (ValueError, RecursionError):
        pass  # it is a text
    return encode(text)


def encode(value: Any) -> str:
    """JSON text of plain data, which UTF-8 can say.

    Raises:
        ValueError: a number in it is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates, which only an escape can say
        return json.dumps(value, allow_nan=False)
    return text


def decode(text: str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, parse_constant=_refuse)


def _parsed(text: str) -> Any:
    """As `decode`, of Python's words, too."""
    return LITERALS[text.lower()] if text.lower() in LITERALS else decode(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _type_name(value: Any) -> frozenset[str]:
    """The JSON types that `value` has."""
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("number", "integer") if value.is_integer() else ("number",))
    return frozenset(("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",))


def _types(schema: Schema, depth: int) -> Iterable[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [one for one in named if isinstance(one, str)]
    found: set[str] = set()
    if depth:
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping):
                    found.update(_types(part, depth - 1))
    values = schema.get("enum")
    if not found and isinstance(values, list):
        for value in values:
            found |= _type_name(value)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
