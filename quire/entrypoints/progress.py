"""A progress bar for long work, on stderr, when a person is looking. Used by `LLM`; owns the bar it shows."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SHOW_AFTER_S = 1.0
REFRESH_S = 0.1


class Progress:
    """Counts finished requests and tokens; shows nothing unless work takes longer than a second.

    Args:
        total: requests.
        is_enabled: False shows nothing ever; nor is anything shown when stderr is no terminal.
    """

    def __init__(self, total: int, *, is_enabled: bool = True) -> None:
        self._total = total
        self._is_enabled = is_enabled and sys.stderr.isatty()
        self._num_finished = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_computed_tokens = 0
        self._start = self._last_shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    def add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One more request is finished."""
        self._num_finished += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens

    def tick(self, num_computed_tokens: int = 0) -> None:
        """A step computed so many tokens; bring the bar up to date, if it is time."""
        self._num_computed_tokens += num_computed_tokens
        now = time.monotonic()
        if not self._is_enabled or now - self._start < SHOW_AFTER_S or now - self._last_shown < REFRESH_S:
            return
        self._last_shown = now
        if self._bar is None:
            self._open()
        self._show()

    def _open(self) -> None:
        # Late: only long work in a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]}"))
        self._bar = Bar(TextColumn("Requests"), *columns, console=Console(stderr=True), transient=False)
        self._task = self._bar.add_task("", total=self._total, speed="")
        self._bar.start()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rates = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        speed = f"{self._num_computed_tokens} tokens computed, in {rates[0]:.0f} tok/s, out {rates[1]:.0f} tok/s"
        self._bar.update(self._task, completed=self._num_finished, speed=speed)
