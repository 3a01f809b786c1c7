"""`response_format` and `structured_outputs` of a request, as the form that its answer must have. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import UnsupportedError, ValidationError
from quire.utils.checks import shown, wrong_type

FIELD = "response_format"
TYPES = ("text", "json_object", "json_schema", "structural_tag")
KEYS = {"text": (), "json_object": (), "json_schema": ("json_schema",)}
"""Type -> keys beside it; those of a structural tag are checked with it."""


def structured_outputs(
    response_format: Mapping[str, Any] | None, given: dict[str, Any] | None, field: str = FIELD
) -> StructuredOutputsParams | None:
    """The form of the answer; None = any text.

    Args:
        response_format: OpenAI's field.
        given: the field `structured_outputs`, which says more.
        field: what the client's API calls the first, for errors.

    Raises:
        ValidationError: one is malformed, or both ask for something.
    """
    asked = None if response_format is None else _of_response_format(response_format, field)
    if given is None:
        return asked
    if asked is not None:
        raise ValidationError(
            f"{field} and structured_outputs both constrain the output",
            hint="leave out one of them", field="structured_outputs",
        )  # fmt: skip
    return StructuredOutputsParams.of(given)


def _of_response_format(value: Mapping[str, Any], field: str) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if isinstance(kind, str) and kind in KEYS:
        _check_keys(kind, value)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, source=field)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(value.get("json_schema")), source=field)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(value), source=field)
    raise ValidationError(
        f"response_format.type={shown(kind)} is unknown", hint=f"use one of {', '.join(TYPES)}", field=FIELD
    )


def _check_keys(kind: str, value: Mapping[str, Any]) -> None:
    """Refuse what the answer would not follow, such as a schema beside `json_object`."""
    for name, given in value.items():
        if name not in ("type", *KEYS[kind]) and given is not None:
            is_schema = name in ("schema", "json_schema")
            hint = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            raise UnsupportedError(
                f"response_format.{shown(name)[1:-1]} is unknown with type {kind}",
                hint=f"send {hint}" if is_schema else "leave it out", field=FIELD,
            )  # fmt: skip


def _schema(value: Any) -> dict[str, Any]:
    """The schema in `{"name": ..., "schema": {...}, "strict": true}`; it is followed whatever `strict` says."""
    if not isinstance(value, Mapping):
        raise wrong_type("response_format.json_schema", value, 'an object such as {"name": ..., "schema": {...}}')
    for name in value:
        if name not in ("name", "schema", "strict", "description"):
            raise UnsupportedError(f"response_format.json_schema.{shown(name)} is unknown", field=FIELD)
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise wrong_type("response_format.json_schema.schema", schema, "an object")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type("response_format.json_schema.strict", strict, "true or false")
    return schema
