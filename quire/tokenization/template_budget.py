"""How much work one rendering of a chat template may do, and the means to stop it.

Made by `ChatTemplate` for each rendering; asked by the sandbox before every operation that can grow a value.
Owns the counters of that rendering. Three bounds together leave no way out: lines and calls executed (`tracing`),
the size of every value (`check`), and time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

MAX_INTEGER_BITS = 4096
# Calls within calls. Far from the interpreter's own limit: reaching that one can end the process.
MAX_CALL_DEPTH = 50
SCALARS = frozenset((int, float, bool, type(None)))


class OverBudgetError(BaseException):
    """Stops a rendering. Not an `Exception`, so that no filter of Jinja takes it for a bad value and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of one rendering.

    Attributes:
        max_source_chars: length of the template.
        max_events: lines of template code and calls that may run.
        max_weight: characters plus elements of any one value, the rendered text included; a part that appears
            twice counts twice.
        max_cpu_s: seconds of this thread on a CPU: another load does not shorten it.
    """

    max_source_chars: int = 256 << 10
    max_events: int = 500_000
    max_weight: int = 8 << 20
    max_cpu_s: float = 5.0


class Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: TemplateLimits, template_name: str) -> None:
        self._limits = limits
        self._template_name = template_name
        self._events_left = limits.max_events
        self._deadline = time.thread_time() + limits.max_cpu_s
        self._weights: dict[int, tuple[Any, int]] = {}
        self._kept_weight = 0
        self._call_depth = 0

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Count the lines of template code and the calls of this thread inside the block.

        Uses the interpreter's trace hook, so that a loop without any output is seen too.
        """
        previous = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(previous)

    def enter_call(self) -> None:
        """A call begins inside those that have not been left; refuse the one that is too deep."""
        self._call_depth += 1
        if self._call_depth > MAX_CALL_DEPTH:
            raise OverBudgetError(f"nests more than {MAX_CALL_DEPTH} calls")

    def leave_call(self) -> None:
        """The call that was entered last has returned. One that raises ends the rendering and need not be left."""
        self._call_depth -= 1

    def check(self, value: Any) -> Any:
        """Return `value`; refuse one that is too large."""
        if isinstance(value, int):
            self.require_bits(value.bit_length())
        else:
            self.weigh(value)
        return value

    def weigh(self, value: Any) -> int:
        """Characters plus elements of `value`; refuse one that is too large."""
        return self.require_weight(self._weight(value))

    def require_weight(self, weight: int) -> int:
        """Refuse a value that would have `weight` characters and elements."""
        if weight > self._limits.max_weight:
            raise OverBudgetError(f"makes a value of more than {self._limits.max_weight} characters and elements")
        return weight

    def require_bits(self, bits: int) -> None:
        """Refuse an integer that would have `bits` bits."""
        if bits > MAX_INTEGER_BITS:
            raise OverBudgetError(f"makes an integer of more than {MAX_INTEGER_BITS} bits")

    def guard(self, items: Iterable[Any]) -> Iterator[Any]:
        """The elements of a lazy sequence, weighed as they come."""
        total = 0
        for item in items:
            total = self.require_weight(total + self._weight(item))
            yield item

    def _weight(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, (list, tuple, dict)):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        weight = self._total_weight(value)
        if isinstance(value, dict):
            weight += self._total_weight(value.values())
        self._keep(value, weight)
        return weight

    def _total_weight(self, items: Collection[Any]) -> int:
        total = self.require_weight(len(items) + 1)
        for item in items:
            kind = type(item)
            if kind is str:
                total += len(item)
            elif kind not in SCALARS:
                total = self.require_weight(total + self._weight(item))
        return total

    def _keep(self, value: Any, weight: int) -> None:
        """Remember the weight of `value`, and `value` itself, so that its id is not given to another one."""
        self._kept_weight += weight
        if self._kept_weight > self._limits.max_weight:
            self._weights.clear()
            self._kept_weight = weight
        self._weights[id(value)] = (value, weight)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        self._spend(0 if file == __file__ else 1)
        return self._on_line if file == self._template_name else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._spend(1)
        return self._on_line

    def _spend(self, events: int) -> None:
        self._events_left -= events
        if self._events_left < 0:
            raise OverBudgetError(f"runs more than {self._limits.max_events} lines")
        if time.thread_time() > self._deadline:
            raise OverBudgetError(f"runs longer than {self._limits.max_cpu_s:g} seconds")
