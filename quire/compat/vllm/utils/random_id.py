"""Random names for requests."""

from __future__ import annotations

import uuid

__all__ = ["random_uuid"]


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
