"""How hard a model is to think, as variables of its chat template. No state."""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ON_OFF = ("none", "medium")


def check_effort(name: str, effort: str, field: str) -> None:
    """Refuse an effort that no API knows."""
    if effort not in EFFORTS:
        raise ValidationError(
            f"{name}={shown(effort)} is unknown", hint=f"use one of {', '.join(EFFORTS)}", field=field
        )


def effort_kwargs(
    name: str, effort: str | None, given: dict[str, Any] | None, source: str, warnings: Warnings
) -> dict[str, Any] | None:
    """The template's variables, with what `effort` asks of it; the request's own go first.

    Args:
        name: of the field.
        given: `chat_template_kwargs` of the request.
        source: of the template.
        warnings: gets the field where the template does not take all of it.
    """
    if effort is None:
        return given
    asked: dict[str, Any] = {}
    if "reasoning_effort" in source:
        asked["reasoning_effort"] = effort
    if "enable_thinking" in source:
        asked["enable_thinking"] = effort != "none"
        if effort not in ON_OFF and len(asked) == 1:
            warnings.add(name, f"{name}: the chat template can only turn reasoning on or off")
    if not asked:
        warnings.add(name, f"{name} has no effect: the chat template does not use it")
    return {**asked, **(given or {})} if asked else given
