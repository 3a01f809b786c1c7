"""Why a grammar could not be compiled. Raised by the compile pool's parts."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ValidationError
from quire.structured_output.interface import GrammarSpec


class BudgetError(ValidationError):
    """A grammar took too much; trying again may go otherwise."""


class OverTimeError(BudgetError):
    """It took too much CPU time."""


class LateError(BudgetError):
    """It was not compiled in time by the clock on the wall, as the machine is too busy."""


class RefusedError(Exception):
    """A library refuses a grammar; `reason` says why."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"{backend}: {reason}")
        self.reason = reason


def refusal(spec: GrammarSpec, reasons: Mapping[str, str]) -> ValidationError:
    """The error of a grammar that every library refuses which was asked: library -> why."""
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    return ValidationError(
        f"the grammar ({spec.kind}) is rejected by {told}",
        hint="correct it" if spec.may_fall_back else "correct it, or set structured_outputs_backend to auto",
        field=f"structured_outputs.{spec.kind}",
    )
