"""Notes: what of a request was not used as it came. Owns what there is to say about one request."""

from __future__ import annotations

from quire.errors import ValidationError
from quire.server.chat.protocol.reading import MAX_WARNINGS


class Notes:
    """What there is to say about parts of a request that were not used.

    Args:
        warnings: gets a line for each, up to `MAX_WARNINGS`.
        is_strict: refuse the request.
    """

    def __init__(self, warnings: list[str], *, is_strict: bool) -> None:
        self._warnings = warnings
        self._is_strict = is_strict

    @property
    def are_full(self) -> bool:
        """True when nothing more is said."""
        return not self._is_strict and len(self._warnings) >= MAX_WARNINGS

    def add(self, field: str, text: str, hint: str | None = None) -> None:
        """Say `text` about `field`, once.

        Args:
            hint: what to do about it; default: to leave out the field.

        Raises:
            ValidationError: strict.
        """
        if self._is_strict:
            raise ValidationError(text, hint=hint or f"leave out {field}", field=field)
        if not self.are_full and text not in self._warnings:
            self._warnings.append(text)
