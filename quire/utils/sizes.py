"""Sizes as people write them. Called by the command line and the readers of files; no state."""

from __future__ import annotations

SIZE_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """An integer with an optional unit: "16k" is 16,000; "16K", "16KiB" are 16,384; "1.5k" is 1,500.

    Raises:
        ValueError: it is not.
    """
    number = text.strip()
    for suffix in ("iB", "ib", "B"):
        number = number.removesuffix(suffix) if number[-len(suffix) - 1 : -len(suffix)] in SIZE_UNITS else number
    if number and number[-1] in SIZE_UNITS:
        scaled = float(number[:-1]) * SIZE_UNITS[number[-1]]
        if not scaled.is_integer():
            raise ValueError(f"{text} is not an integer")
        return int(scaled)
    return int(number)
