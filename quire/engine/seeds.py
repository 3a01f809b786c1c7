"""The 64-bit keys of requests' random numbers. Called by the input processor; pure functions."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers that spreads every bit over all others.

    Source: Steele, Lea, Flood 2014 (Fast Splittable Pseudorandom Number Generators), the finalizer of SplitMix64.
    """
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def request_key(seed: int | None, engine_seed: int, handle: int) -> int:
    """The key of a request: from its own seed alone, else from the engine's seed and its handle."""
    if seed is not None:
        return mix64(seed & MASK)
    return mix64(mix64(engine_seed & MASK) ^ mix64(~handle & MASK))
