"""From what a request demands to the grammar it needs, once a backend is chosen. Pure functions."""

from __future__ import annotations

from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams, json_text
from quire.structured_output.interface import GrammarSpec

ANY_OBJECT = '{"type": "object", "additionalProperties": true}'


def spec_of(params: StructuredOutputsParams) -> GrammarSpec:
    """The grammar of `params`, whose backend is chosen."""
    kind, value = params.kind, _value(params)
    if kind == "json_object":
        kind, value = "json", ANY_OBJECT
    return GrammarSpec(
        kind=kind,
        text=value if isinstance(value, str) else json_text(f"structured_outputs.{kind}", value),
        backend=params.backend,
        any_whitespace=not params.disable_any_whitespace,
        whitespace_pattern=params.whitespace_pattern,
        max_whitespace_cnt=params.max_whitespace_cnt,
        may_fall_back=params.may_fall_back,
    )


def _value(params: StructuredOutputsParams) -> Any:
    return getattr(params, params.kind)
