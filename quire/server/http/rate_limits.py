"""Bucket: so much a minute, refilled evenly; and the headers for OpenAI's clients. Owns its level."""

from __future__ import annotations

import math
from collections.abc import Callable

MINUTE_US = 60_000_000


class Bucket:
    """Starts full. Integers throughout, so that what waits exactly `wait_s` finds what it waited for.

    Args:
        per_minute: its size, and what is refilled in a minute.
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = per_minute * MINUTE_US  # in parts of which a minute refills MINUTE_US * per_minute
        self._time_us = self._now_us()

    @property
    def remaining(self) -> int:
        """What may be taken now; 0 while debts are paid off."""
        return max(0, self._refilled()[0] // MINUTE_US)

    @property
    def full_after_s(self) -> float:
        """Seconds until it is full."""
        return self._seconds_until(self.per_minute * MINUTE_US)

    def wait_s(self, amount: int) -> float:
        """Seconds, in whole microseconds, until `amount` may be taken; 0 = now. Never more than it holds is needed."""
        return self._seconds_until(min(amount, self.per_minute) * MINUTE_US)

    def take(self, amount: int) -> None:
        """Take `amount`, of which there may be too little: the rest is a debt."""
        level, now = self._refilled()
        self._write(level - amount * MINUTE_US, now)

    def resize(self, per_minute: int) -> None:
        """Change the size; what was taken stays taken, as far as it fits."""
        level, now = self._refilled()
        self._write(min(level, per_minute * MINUTE_US), now)
        self.per_minute = per_minute

    def _refilled(self) -> tuple[int, int]:
        """(level, time) of now."""
        now = self._now_us()
        level, then = self._read()
        return min(self.per_minute * MINUTE_US, level + (now - then) * self.per_minute), now

    def _read(self) -> tuple[int, int]:
        """The level that was written last, and when."""
        return self._level, self._time_us

    def _write(self, level: int, time_us: int) -> None:
        self._level, self._time_us = level, time_us

    def _seconds_until(self, level: int) -> float:
        missing = level - self._refilled()[0]
        return max(0, -(-missing // self.per_minute)) / 1e6

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)


def rate_headers(requests: Bucket | None, tokens: Bucket | None) -> list[tuple[bytes, bytes]]:
    """What OpenAI's API says of limits with every answer."""
    headers = []
    for name, bucket in ((b"requests", requests), (b"tokens", tokens)):
        if bucket is not None:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                (b"x-ratelimit-remaining-" + name, b"%d" % bucket.remaining),
                (b"x-ratelimit-reset-" + name, duration(bucket.full_after_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(round(seconds * 1e3, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
