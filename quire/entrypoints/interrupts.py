"""Ctrl-C between steps: a step that is cut in half would leave the engine unusable.

Used by `LLM` and the command line around their step loops. Owns the process's SIGINT handler while it is entered.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Remembers a first Ctrl-C until it is asked for; a second one interrupts at once.

    Does nothing outside the main thread, or where the program has a SIGINT handler of its own.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._is_installed = False

    def __enter__(self) -> DeferredInterrupt:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._remember)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def raise_if_pending(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt

    def _remember(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True
