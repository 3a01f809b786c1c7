"""Warnings: what of one request is not used as it came. One for each request, made by `read_request`, for all APIs.

Returned as `warnings` of the answer; with `strict_requests` the first unused field refuses the request instead.
"""

from __future__ import annotations

from quire.errors import ValidationError

MAX_WARNINGS = 32


class Warnings:
    """Warnings about one request, each once and at most `MAX_WARNINGS`.

    Args:
        is_strict: a field that is not used refuses the request.

    Attributes:
        texts: in the order in which they came.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self.texts: list[str] = []

    @property
    def are_full(self) -> bool:
        """True when no further warning is taken, so that the caller need not look for one."""
        return not self._is_strict and len(self.texts) >= MAX_WARNINGS

    def add(self, field: str, text: str, hint: str | None = None) -> None:
        """`field` is not used, or not as it came: `text` says how.

        Args:
            hint: what to do about it; default: to leave out the field.

        Raises:
            ValidationError: strict.
        """
        if self._is_strict:
            raise ValidationError(text, hint=hint or f"leave out {field}", field=field)
        self.advise(text)

    def advise(self, text: str) -> None:
        """What the client should know though every field is used; never refuses the request."""
        if len(self.texts) < MAX_WARNINGS and text not in self.texts:
            self.texts.append(text)
