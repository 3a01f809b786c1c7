"""How much the long tests try: little in `make test`, all of it in `make test-full`."""

from __future__ import annotations

import os
from typing import TypeVar

IS_FULL = os.environ.get("QUIRE_TEST_FULL") == "1"
T = TypeVar("T")


def effort(little: T, full: T) -> T:
    """A count, or whatever says how much is tried."""
    return full if IS_FULL else little
